"""Modules that enter by a socket and have no public name for which ``f8sub`` itself would import them."""

from f8sub.convert import defaults as defaults
from f8sub.convert import fused_encoders as fused_encoders
from f8sub.convert import idle_patterns as idle_patterns
from f8sub.convert import keep_x as keep_x
from f8sub.convert import linear_subclasses as linear_subclasses
from f8sub.convert import migration_errors as migration_errors
from f8sub.convert import nothing_converted as nothing_converted
from f8sub.convert import reencoding_warning as reencoding_warning
from f8sub.convert import reference_warning as reference_warning
from f8sub.delayed import histories as histories
from f8sub.diagnostics import sample_experts as sample_experts
from f8sub.diagnostics import searched_experts as searched_experts
from f8sub.diagnostics import sensitive_experts as sensitive_experts
from f8sub.experts import converter as converter
from f8sub.tensor import aten_ops as aten_ops
from f8sub.tensor import slicing_ops as slicing_ops
