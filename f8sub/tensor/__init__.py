"""Float8Tensor, and the operators and products that training runs on it."""
