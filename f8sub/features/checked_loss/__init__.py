"""What a user's `loss_of` returned: a loss that backward starts from, or an error."""
