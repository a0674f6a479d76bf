"""What compiled autograd functions return: a tensor that nothing else in their forward is.

Torch 2.11 hands all that a forward makes to autograd as its results. If the result is also something before it, as what
``.to()`` did not change is, or is a view of that, the gradient goes to the other and the function gets zeros.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import f8sub
from f8sub.experts import seams
from tests.experts import test_gated_linear as gated
from tests.experts import test_sent as sent
from tests.experts.models import MODELS, OwnExperts, experts_of, of_transformers
from tests.layers import made, x_of
from tests.selection import long_but

DTYPES = torch.bfloat16, torch.float32
pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Looking:
    """A backend that runs a graph as it is, and names the results of its functions that are not their own."""

    def __init__(self) -> None:
        self.functions = 0
        self.shared: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            if node.target is torch.ops.higher_order.autograd_function_apply:
                self.functions += 1
                self._look(getattr(graph, node.args[0].target).graph)
        return graph.forward

    def _look(self, forward: torch.fx.Graph) -> None:
        *nodes, output = forward.nodes
        results = output.args[0][0]
        # f8sub's functions have one; torch 2.11 has all that they make behind it.
        result = results if isinstance(results, torch.fx.Node) else results[0]
        value = result.meta["example_value"]
        same = [node for node in nodes if node is not result and node.meta.get("example_value") is value]
        if same or value._is_view():
            self.shared.append(f"{result.format_node()}: {same or 'a view'}")


def look(module: Callable[..., Any], *args: Any) -> None:
    looking = Looking()
    torch.compile(module, backend=looking, fullgraph=True)(*args)
    assert looking.functions
    assert not looking.shared


@pytest.mark.parametrize("under", [contextlib.nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)])
@pytest.mark.parametrize("shape", [(8, 32), (2, 4, 32)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_layers(dtype, shape, under):
    """Of other recipes than this one a layer is one node to the compiler."""
    layer, x = made("delayed", dtype), x_of(*shape, dtype=dtype)
    f8sub.precompute_scales(layer)
    with under():
        look(layer, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", long_but(["tensorwise"], gated.FUSED))
def test_experts(recipe, dtype):
    f8sub.register_experts(OwnExperts)
    model = torch.nn.Sequential(OwnExperts(3, 32, 16)).to(dtype)
    module = f8sub.convert_to_float8(model, recipe, experts=True)[0]
    look(module, x_of(11, 32, dtype=dtype), torch.tensor([4, 4, 11]))


@pytest.mark.parametrize("factors", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", long_but(["tensorwise"], gated.FUSED))
def test_experts_of_transformers(recipe, dtype, factors):
    look(sent.experts(recipe).to(dtype), *sent.given(dtype=dtype, factors=factors))


@pytest.mark.parametrize("kind", long_but(["gpt_oss"], MODELS))
def test_experts_whose_forward_sorts_tokens(kind, monkeypatch):
    """As where SwiGLU is not in the casts."""
    monkeypatch.setattr(seams, "sent_swiglu", lambda *args, **how: None)
    model = f8sub.convert_to_float8(of_transformers(kind).bfloat16(), experts=True)
    look(experts_of(model)[0], *sent.given())


def test_what_is_shared_is_found():
    class Ends(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, how):
            return how(x + 1)

        @staticmethod
        def backward(ctx, dy):
            return dy, None

    for how, is_found in (
        (lambda y: y, False),
        (lambda y: y.to(torch.float32), True),
        (lambda y: y.to(torch.float64), False),
        (lambda y: y.view(-1), True),
    ):
        looking = Looking()
        torch._dynamo.reset()
        torch.compile(lambda x, how=how: Ends.apply(x, how), backend=looking)(x_of(2, 3))
        assert bool(looking.shared) == is_found
