"""What enters by the core's sockets: each folder could be deleted with its tests.

Those that are imported here have no public name that ``f8sub`` itself would import.
"""

from f8sub.convert import defaults as defaults
from f8sub.convert import fused_encoders as fused_encoders
from f8sub.convert import idle_patterns as idle_patterns
from f8sub.convert import keep_x as keep_x
from f8sub.convert import linear_subclasses as linear_subclasses
from f8sub.convert import migration_errors as foreign_calls
from f8sub.convert import nothing_converted as nothing_converted
from f8sub.convert import reencoding_warning as reencoding_warning
from f8sub.convert import reference_warning as reference_warning
from f8sub.delayed import histories as histories
from f8sub.diagnostics import sample_experts as probe
from f8sub.diagnostics import searched_experts as searched
from f8sub.diagnostics import sensitive_experts as sensitive
from f8sub.experts import converter as converter
from f8sub.kernels import cast_ops as casts
from f8sub.kernels import cpu as host_quantizer
from f8sub.kernels import graph_ops as graphs
from f8sub.kernels import hadamard as hadamard
from f8sub.kernels.gemm import scales_of_a_byte as scales_of_a_byte
from f8sub.linear import checkpointed_product as product
from f8sub.linear import one_node as one_node
from f8sub.linear import shared_input as shared_inputs
from f8sub.tensor import aten_ops as operators
from f8sub.tensor import slicing_ops as handlers
from f8sub.weights import fsdp1 as fsdp1
from f8sub.weights import non_finite as held_weights
from f8sub.weights import shard_checks as shard_checks
