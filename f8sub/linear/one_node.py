"""Compiled forwards of layers whose weight or x is a DTensor of float8: one node to dynamo, which cannot look inside.

AOTAutograd runs the node while it traces, with tensors that show what is in them, and so compiles what is in the node.
"""

from typing import TYPE_CHECKING, Any

import torch

from f8sub.kernels.gemm.select import Plan
from f8sub.kernels.graph_ops import enter_graph_functions, in_graph
from f8sub.kernels.scales import CURRENT_SOURCES
from f8sub.linear.dtensor import Places
from f8sub.linear.matmul import Float8Matmul
from f8sub.torch_compat import compiling, untraced

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from f8sub.linear.float8_linear import Float8Linear


class _TracedMatmul(Float8Matmul):
    """``Float8Matmul`` in the node. Its backward runs when nothing of the node does any more."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        with compiling():
            return Float8Matmul.forward(ctx, *args)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with compiling():
            return Float8Matmul.backward(ctx, dy)


class Unnamed:
    """What a node knows of its layer: it is of all layers of a kind."""

    fqn = "a layer in compiled code"


@in_graph
def _node(
    x: torch.Tensor, weight: "DTensor", bias: torch.Tensor | None, key: str, dtype: torch.dtype, keep_x: str
) -> torch.Tensor:
    """What ``Float8Linear.forward`` does with a weight that is a DTensor, by the plan of that key."""
    plan = Plan.made[key]
    with compiling():
        places = Places.of(Unnamed, weight, x)
        sources = places.sources(Unnamed, plan, weight, x, CURRENT_SOURCES)
        of_rank = places.local(x, weight, bias)
        y: torch.Tensor = _TracedMatmul.apply(*of_rank, (plan, dtype, sources), keep_x, places.adds_bias)  # type: ignore[no-untyped-call]
        return places.whole(y)


@untraced
def _eagerly(layer: "Float8Linear", x: torch.Tensor) -> torch.Tensor:
    return layer.forward(x)


def one_node(
    layer: "Float8Linear",
    plan: Plan,
    dtype: torch.dtype,
    x: torch.Tensor,
    weight: "DTensor",
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The layer's forward, in the graph; eagerly between two graphs where scales are made of what the layer keeps."""
    if plan.recipe.scaling is not None:
        return _eagerly(layer, x)
    enter_graph_functions()
    return _node(x, weight, bias, plan.key, dtype, layer.keep_x)
