"""Float8Tensor, and the operators and products that training runs on it."""

from f8sub.tensor import dispatch  # noqa: F401  (fills Float8Tensor's table)
