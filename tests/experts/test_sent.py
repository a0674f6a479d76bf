"""Experts of transformers whose casts read tokens where they lie: the bits of tokens that are sorted first."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import f8sub
from f8sub.experts import grouped_linear as calls
from tests.data_sets import gaussian, generator
from tests.experts.models import experts_of, of_transformers
from tests.experts.test_gated_linear import FUSED
from tests.selection import long_but

TOKENS, WIDTH, EXPERTS = 11, 32, 6
ELSEWHERE = 3
"""Numbers past the last expert's, of experts on other ranks."""
ROUTES = {
    "all here": EXPERTS,
    "some elsewhere": EXPERTS + ELSEWHERE,
    "few experts have tokens": 2,
}
"""From how many experts tokens choose."""

Tensors = tuple[torch.Tensor, ...]


def experts(recipe: str = "tensorwise") -> Any:
    plain = nn.Sequential(*experts_of(of_transformers("qwen3_moe")))
    return f8sub.convert_to_float8(plain, recipe, experts=True)[0]


def given(
    experts: int = EXPERTS,
    top_k: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    factors: torch.dtype = torch.bfloat16,
) -> Tensors:
    """Tokens, their experts, and the router's weights.

    Where experts are elsewhere the first token is sent to none of those here, and is NaN; so are the weights of choices
    that are not here.
    """
    rng = generator(1)
    x = gaussian((TOKENS, WIDTH), rng).to(dtype)
    chosen = torch.randint(experts, (TOKENS, top_k), generator=rng)
    weights = torch.rand(TOKENS, top_k, generator=rng).to(factors)
    if experts > EXPERTS:
        chosen[0], x[0] = EXPERTS, torch.nan
        weights[chosen >= EXPERTS] = torch.nan
    return x.requires_grad_(), chosen, weights.requires_grad_()


def sorted_first(module: Any, recipe: str, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor):
    """Tokens are copied in the order of their experts, and results are copied back, by autograd's own operators."""
    tokens, top_k = chosen.shape
    order = chosen.flatten().argsort(stable=True)
    experts = len(module.down_proj)
    ends = torch.bincount(chosen[chosen < experts].flatten(), minlength=experts).cumsum(0)
    sent = x[:, None].expand(-1, top_k, -1).reshape(-1, x.shape[1])[order]
    y = f8sub.grouped_swiglu(sent, module.gate_up_proj, None, module.down_proj, ends, recipe)
    is_here = (chosen.flatten()[order] < experts)[:, None]
    weighted = torch.where(is_here, y * weights.reshape(-1, 1)[order], 0)
    return weighted[order.argsort()].view(tokens, top_k, -1).sum(1).to(x.dtype)


def ran(call: Callable[..., torch.Tensor], tensors: Tensors, module: nn.Module) -> list[torch.Tensor]:
    """The result, and the gradients of all that need one; of a token that is NaN the gradient handed in is, too."""
    y = call(*tensors)
    dy = gaussian(tuple(y.shape), generator(4)).to(y.dtype)
    dy[tensors[0].detach().isnan()] = torch.nan
    needed = [tensor for tensor in (*tensors, *module.parameters()) if tensor.requires_grad]
    return [y.detach(), *(torch.autograd.grad(y, needed, dy) if needed else ())]


def assert_same(found: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(found) == len(right)
    for a, b in zip(found, right, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def of_node(y: torch.Tensor) -> bool:
    return type(y.grad_fn).__name__ == "GatedMatmulBackward"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("top_k", [1, 8])
@pytest.mark.parametrize("recipe", long_but(["tensorwise", "blockwise"], FUSED))
def test_it_is_as_if_tokens_were_sorted_first(recipe, top_k, route):
    module, tensors = experts(recipe), given(ROUTES[route], top_k)
    found = ran(module, tensors, module)
    assert of_node(module(*tensors))
    assert_same(found, ran(lambda *args: sorted_first(module, recipe, *args), tensors, module))
    assert all(tensor.isfinite().all() for tensor in found)


@pytest.mark.parametrize("route", ROUTES)
def test_a_monitor_sees_the_same_results_product_by_product(route):
    """The way of tokens that are sorted first, which other modules go."""
    module, tensors = experts(), given(ROUTES[route])
    found = ran(module, tensors, module)
    seen: list[calls.Multiplied] = []
    with calls.watching(lambda owner, made: seen.append(made)):
        right = ran(module, tensors, module)
    assert len(seen) == 2
    # Its masked rows have a gradient of 0 times NaN, which it takes as one of no expert.
    assert_same(found, right)


@pytest.mark.parametrize("factors", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_other_dtypes(dtype, autocast, factors):
    """Products of a dtype that is not cast are rounded as PyTorch rounds them."""
    module, tensors = experts("rowwise"), given(EXPERTS + ELSEWHERE, 2, dtype, factors)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = ran(module, tensors, module)
        right = ran(lambda *args: sorted_first(module, "rowwise", *args), tensors, module)
    assert_same(found, right)


FROZEN = [
    (0,),
    (1,),
    (2,),
    (3,),
    (0, 1),
    (2, 3),
    (0, 2),
    (0, 1, 2),
    (0, 1, 3),
    (0, 2, 3),
    (1, 2, 3),
    (0, 1, 2, 3),
]


@pytest.mark.parametrize("frozen", FROZEN)
def test_what_needs_no_gradient_gets_none_and_changes_no_other(frozen):
    """Of tokens, the router's weights, gate and up, and down."""
    module, tensors = experts(), given(EXPERTS + ELSEWHERE)
    for index in frozen:
        (tensors[0], tensors[2], *module.parameters())[index].requires_grad_(False)
    found = ran(module, tensors, module)
    assert_same(found, ran(lambda *args: sorted_first(module, "tensorwise", *args), tensors, module))


def by_backward(call: Callable[..., torch.Tensor], tensors: Tensors, module: nn.Module) -> list[torch.Tensor]:
    """``ran`` by ``backward``, which reentrant checkpoints take alone."""
    needed = [tensor for tensor in (*tensors, *module.parameters()) if tensor.requires_grad]
    for tensor in needed:
        tensor.grad = None
    y = call(*tensors)
    y.backward(gaussian(tuple(y.shape), generator(4)).to(y.dtype))
    return [y.detach(), *(tensor.grad for tensor in needed)]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_repeated_forward_is_the_first_one(recipe, reentrant):
    module, tensors = experts(recipe), given(EXPERTS + ELSEWHERE)

    def repeated(*given: torch.Tensor) -> torch.Tensor:
        return checkpoint(module, *given, use_reentrant=reentrant)

    assert_same(by_backward(repeated, tensors, module), by_backward(module, tensors, module))


class Layer(nn.Module):
    """A router and experts, which read the same tokens."""

    def __init__(self, module: nn.Module, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.experts, self.call = module, call
        self.router = nn.Parameter(gaussian((EXPERTS, WIDTH), generator(2)).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = (x @ self.router.t()).float().softmax(-1).topk(2)
        return x + self.call(x, chosen, (scores / scores.sum(-1, keepdim=True)).to(x.dtype))


def test_router_and_experts_read_the_same_tokens():
    module, x = experts(), given()[:1]
    ours = Layer(module, module)
    right = Layer(module, lambda *args: sorted_first(module, "tensorwise", *args))
    assert_same(ran(ours, x, ours), ran(right, x, right))


class Made(TorchDispatchMode):
    """Lists operators that make as many elements as all rows of tokens have, in bf16, and after how many casts.

    What a cast does is left out: on a CPU it is the specification, which puts rows together first.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.casts, self.is_cast, self.made = 0, False, []
        quantize = calls.quantize_computed

        def noted(*args: Any) -> Any:
            self.is_cast = True
            try:
                return quantize(*args)
            finally:
                self.casts, self.is_cast = self.casts + 1, False

        monkeypatch.setattr(calls, "quantize_computed", noted)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_one = isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16 and not self.is_cast
        # What is expanded has a shape and no memory.
        if is_one and out.numel() == 2 * TOKENS * WIDTH <= out.untyped_storage().nbytes() // 2:
            self.made.append((self.casts, str(func)))
        return out

    @property
    def gathers(self) -> int:
        return sum(name == "aten.index.Tensor" for _, name in self.made)


def test_no_rows_are_put_together_before_they_are_cast(monkeypatch):
    """One gather puts results back in the order of tokens, one their gradients."""
    module, tensors = experts(), given(EXPERTS + ELSEWHERE)
    with monkeypatch.context() as patch, Made(patch) as forward:
        y = module(*tensors)
    dy = gaussian(tuple(y.shape), generator(4)).bfloat16()
    with monkeypatch.context() as patch, Made(patch) as backward:
        torch.autograd.grad(y, [tensors[0], tensors[2], *module.parameters()], dy)
    for found in (forward, backward):
        assert found.casts == 2
        assert [name for casts, name in found.made if casts == 0] == []
        assert found.gathers == 1
    # By copies there are two gathers in each pass.
    with monkeypatch.context() as patch, Made(patch) as forward:
        sorted_first(module, "tensorwise", *tensors)
    assert forward.gathers == 2


@pytest.mark.parametrize("needed", [True, False])
def test_tokens_are_saved_as_codes_and_results_for_the_routers_weights_alone(needed):
    """Besides the results of gate and up, which have as many elements here."""
    module, (x, chosen, weights) = experts(), given()
    weights.requires_grad_(needed)
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(x, chosen, weights)
    rows = [t for t in saved.values() if t.dtype == torch.bfloat16 and t.numel() == 2 * TOKENS * WIDTH]
    assert len(rows) == 1 + needed
    assert x.data_ptr() not in saved
    assert of_node(y)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("recipe", long_but(["tensorwise"], FUSED))
def test_compiled_it_is_one_graph_with_four_casts(recipe):
    """Of tokens, SwiGLU's result, its gradient and dy, each of which is computed where it is cast."""
    names: list[str] = []

    def collect(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    backend = aot_autograd(fw_compiler=collect, bw_compiler=collect)
    module, tensors = experts(recipe), given(EXPERTS + ELSEWHERE)
    found = ran(torch.compile(module, backend=backend, fullgraph=True), tensors, module)
    # On a CPU sums depend on strides, which compiled code has others of.
    plain = experts_of(of_transformers("qwen3_moe"))[0]
    copying = torch.compile(lambda *args: sorted_first(plain, recipe, *args), backend="aot_eager")
    assert_same(found, ran(copying, tensors, plain))
    assert names.count("f8sub.quantize_computed.default") == 4
    assert not any("quantize_groups" in name for name in names)
