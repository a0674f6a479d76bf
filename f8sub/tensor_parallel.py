"""Styles for ``parallelize_module`` with which a sequence-parallel input crosses the wire as float8."""

from f8sub.features.tensor_parallel.styles import Float8ColwiseParallel as Float8ColwiseParallel
from f8sub.features.tensor_parallel.styles import Float8RowwiseParallel as Float8RowwiseParallel
from f8sub.features.tensor_parallel.styles import PrepareFloat8ModuleInput as PrepareFloat8ModuleInput
