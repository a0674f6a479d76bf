"""Float8Tensor, what operators do with it, and what makes one of high precision."""

from f8sub.tensor import dispatch  # noqa: F401  (fills Float8Tensor's table)
