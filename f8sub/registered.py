"""Modules that enter by a socket and have no public name for which ``f8sub`` itself would import them."""

from f8sub.convert import experts as experts
from f8sub.tensor import aten_ops as aten_ops
