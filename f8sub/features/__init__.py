"""What enters by the core's sockets: each folder could be deleted with its tests.

Those that are imported here have no public name that ``f8sub`` itself would import.
"""

from f8sub.features.checkpointing import casts as casts
from f8sub.features.checkpointing import graphs as graphs
from f8sub.features.checkpointing import product as product
from f8sub.features.defaults import defaults as defaults
from f8sub.features.delayed import histories as histories
from f8sub.features.experts import converter as converter
from f8sub.features.foreign_calls import foreign_calls as foreign_calls
from f8sub.features.fused_encoders import fused_encoders as fused_encoders
from f8sub.features.hadamard import hadamard as hadamard
from f8sub.features.host_quantizer import host_quantizer as host_quantizer
from f8sub.features.keep_x import keep_x as keep_x
from f8sub.features.linear_subclasses import linear_subclasses as linear_subclasses
from f8sub.features.monitored_experts import probe as probe
from f8sub.features.non_finite import held_weights as held_weights
from f8sub.features.report import idle_patterns as idle_patterns
from f8sub.features.report import nothing_converted as nothing_converted
from f8sub.features.report import reencoding_warning as reencoding_warning
from f8sub.features.report import reference_warning as reference_warning
from f8sub.features.scales_of_a_byte import scales_of_a_byte as scales_of_a_byte
from f8sub.features.searched_experts import searched as searched
from f8sub.features.sensitive_experts import sensitive as sensitive
from f8sub.features.shard_checks import fsdp1 as fsdp1
from f8sub.features.shard_checks import shard_checks as shard_checks
from f8sub.features.shared_inputs import shared_inputs as shared_inputs
from f8sub.features.slicing import handlers as handlers
from f8sub.features.tensor_parallel import one_node as one_node
from f8sub.features.tensors import operators as operators
