"""Modules that enter by a socket and have no public name for which ``f8sub`` itself would import them."""

from f8sub.diagnostics import sample_experts as sample_experts
from f8sub.diagnostics import searched_experts as searched_experts
from f8sub.diagnostics import sensitive_experts as sensitive_experts
from f8sub.experts import converter as converter
from f8sub.tensor import aten_ops as aten_ops
