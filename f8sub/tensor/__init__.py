"""Tensor subclasses: the quantized value and the sharded master weight."""

from f8sub.tensor import dispatch  # noqa: F401  (fills Float8Tensor's table)
