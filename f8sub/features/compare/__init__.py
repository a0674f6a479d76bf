"""Float8 against bf16 on a user's own model and batches: losses, gradients, a page."""
