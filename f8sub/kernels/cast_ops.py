"""x of a checkpointed function in compiled code: cast for fprop in forward, for wgrad in backward.

One operator that makes both usages would make in each pass codes that this pass does not read. Apart, the compiler
fuses the rowwise cast with what is around it, and forward launches no operator of ours for it.
"""

import torch
from torch.fx.traceback import get_current_meta

from f8sub.formats import Float8Format, present
from f8sub.kernels import ops, reference
from f8sub.kernels.graph_ops import enter_graph_functions, in_graph, policies


def quantize(
    x: torch.Tensor, amax: torch.Tensor | None, rowwise: str | None, columnwise: str | None
) -> list[torch.Tensor]:
    """``ops.quantize_as_one_node``, which is the columnwise usage alone where the function is checkpointed."""
    enter_graph_functions()
    return _in_graph(x, amax, rowwise, columnwise)


@in_graph
def _in_graph(
    x: torch.Tensor, amax: torch.Tensor | None, rowwise: str | None, columnwise: str | None
) -> list[torch.Tensor]:
    is_checkpointed = bool(policies()) or "recompute" in get_current_meta()
    row = None if rowwise is None else Float8Format.parse(rowwise)
    if row is None or columnwise is None or not is_checkpointed or not ops.is_fusible(row):
        together: list[torch.Tensor] = ops.quantize_as_one_node(x, amax, rowwise, columnwise)
        return together
    made = reference.quantize(x, row, None, reduce=None if amax is None else lambda own, tile: amax)
    return [*present(made.rowwise).tensors, *ops.quantize_as_one_node(x, amax, None, columnwise)]


ops.quantize_in_graph = quantize
