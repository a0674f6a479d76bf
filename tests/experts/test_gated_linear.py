"""grouped_swiglu is three calls of grouped_linear with PyTorch's SwiGLU between them, bit for bit on a CPU."""

import copy
import gc
import itertools
import types
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import f8sub
from f8sub.experts import grouped_linear as calls
from f8sub.experts import seams
from tests.data_sets import gaussian, generator
from tests.experts.models import experts_of, of_transformers
from tests.experts.test_conversion import registered  # noqa: F401
from tests.selection import long_but

EXPERTS, WIDTH, HIDDEN, TAIL = 4, 64, 96, 3
COUNTS = [9, 0, 20, 3]
ENDS = torch.tensor(COUNTS).cumsum(0)
RECIPES = ("tensorwise", "rowwise", "blockwise", "gridquant", "mxfp8", "rowwise_with_gw_hp", "nvfp4")
FUSED = RECIPES[:5]
"""All of whose products read codes, by groups."""

Tensors = tuple[torch.Tensor, ...]


def given(*, together: bool, transposed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """x, then gate and up together or each, then down; rows of no expert are NaN."""
    rng = generator(3)
    x = gaussian((sum(COUNTS) + TAIL, WIDTH), rng)
    x[-TAIL:] = torch.nan
    shapes = [(2 * HIDDEN, WIDTH)] if together else [(HIDDEN, WIDTH)] * 2
    weights = [gaussian((EXPERTS, *shape), rng) / 8 for shape in (*shapes, (WIDTH, HIDDEN))]
    if transposed:
        weights = [w.transpose(1, 2).contiguous() for w in weights]
    return tuple(tensor.to(dtype).requires_grad_() for tensor in (x, *weights))


def at_once(x: torch.Tensor, *weights: torch.Tensor, **how) -> torch.Tensor:
    gate, up = weights[0], weights[1] if len(weights) == 3 else None
    return f8sub.grouped_swiglu(x, gate, up, weights[-1], ENDS, **how)


def by_product(x: torch.Tensor, *weights: torch.Tensor, **how) -> torch.Tensor:
    found = [f8sub.grouped_linear(x, w, ENDS, **how) for w in weights[:-1]]
    gate, up = found if len(found) == 2 else found[0].chunk(2, 1)
    return f8sub.grouped_linear(F.silu(gate) * up, weights[-1], ENDS, **how)


def ran(call: Callable[..., torch.Tensor], tensors: Tensors, **how) -> list[torch.Tensor]:
    """y, and the gradients of all that need one."""
    y = call(*tensors, **how)
    dy = gaussian(tuple(y.shape), generator(4)).to(y.dtype)
    needed = [tensor for tensor in tensors if tensor.requires_grad]
    return [y.detach(), *(torch.autograd.grad(y, needed, dy) if needed else ())]


def assert_same(tensors: Tensors, **how) -> None:
    found, right = ran(at_once, tensors, **how), ran(by_product, tensors, **how)
    assert len(found) == len(right)
    assert all(map(torch.equal, found, right))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("recipe", long_but(["tensorwise", "blockwise", "rowwise_with_gw_hp"], RECIPES))
def test_it_is_three_products(recipe, together, transposed):
    tensors = given(together=together, transposed=transposed)
    assert_same(tensors, recipe=recipe, transposed=transposed)
    y = at_once(*tensors, recipe=recipe, transposed=transposed)
    assert (type(y.grad_fn).__name__ == "GatedMatmulBackward") == (recipe in FUSED)
    assert not y[-TAIL:].any()


@pytest.mark.parametrize("together", [True, False])
def test_it_is_the_layer_of_float64_but_for_rounding(together):
    """Against SwiGLU of exact products; a Float8Linear's own error is 28 dB."""
    tensors = given(together=together)
    found = ran(at_once, tensors, recipe="rowwise")
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    rows = [slice(int(end) - count, int(end)) for end, count in zip(ENDS, COUNTS, strict=True)]
    x, *inputs, down = exact

    def of_expert(index: int) -> torch.Tensor:
        both = x[rows[index]] @ torch.cat([w[index] for w in inputs]).t()
        gate, up = both.chunk(2, 1)
        return (gate * torch.sigmoid(gate) * up) @ down[index].t()

    y = torch.cat([of_expert(index) for index in range(EXPERTS)])
    dy = gaussian((sum(COUNTS) + TAIL, WIDTH), generator(4)).bfloat16().double()[:-TAIL]
    right = [y.detach(), *torch.autograd.grad(y, exact, dy)]
    for got, wanted in zip(found, right, strict=True):
        # Of x the rows of no expert take no part.
        got = got.double()[: len(y)] if got.shape[0] == len(y) + TAIL else got.double()
        wanted = wanted[: len(y)] if wanted.shape[0] == len(y) + TAIL else wanted
        assert (got - wanted).norm() < 10 ** (-22 / 20) * wanted.norm()


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (3,), (1, 2), (0, 1, 2), (1, 2, 3), (0, 1, 2, 3)])
def test_what_needs_no_gradient_gets_none_and_changes_no_other(frozen):
    """Of x, gate, up and down; nothing of a product is saved for a weight that does not train."""
    tensors = given(together=False)
    for index in frozen:
        tensors[index].requires_grad_(False)
    assert_same(tensors, recipe="tensorwise")


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_nothing_is_cast_for_a_frozen_weight_of_an_x_without_gradient(recipe, monkeypatch):
    """On a GPU no kernel is for no usage."""
    tensors = given(together=False)
    for frozen in tensors[:2]:
        frozen.requires_grad_(False)
    cast, quantize = [], calls.quantize_computed

    def noted(gated, *formats_and_how):
        cast.append(gated.side)
        return quantize(gated, *formats_and_how)

    monkeypatch.setattr(calls, "quantize_computed", noted)
    assert_same(tensors, recipe=recipe)
    assert cast == ["result", "up"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype):
    assert_same(given(together=True, dtype=dtype), recipe="rowwise")
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(given(together=False, dtype=dtype), recipe="tensorwise")


def test_without_a_recipe_it_is_in_high_precision():
    assert_same(given(together=True))


@pytest.mark.parametrize("together", [True, False])
def test_it_saves_no_more_than_codes_and_the_results_of_gate_and_up(together):
    """Between products PyTorch saves what SiLU and the multiplication read; here backward computes it again."""
    tensors = given(together=together)
    rows = sum(COUNTS) + TAIL
    # SiLU's result, in bf16; by one weight gate and up are views of what is saved in both.
    assert saved_bytes(by_product, tensors) - saved_bytes(at_once, tensors) >= 2 * rows * HIDDEN


def test_where_down_alone_trains_it_saves_what_that_product_does():
    """No gradient is computed from the results of gate and up, and none are kept until backward."""
    tensors = given(together=False)
    for frozen in tensors[:-1]:
        frozen.requires_grad_(False)
    assert saved_bytes(at_once, tensors) <= saved_bytes(by_product, tensors)


def saved_bytes(call: Callable[..., torch.Tensor], tensors: Tensors) -> int:
    """Bytes of all storages that a call saves for backward, those of what it was given excepted."""
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = call(*tensors, recipe="tensorwise")
    for tensor in tensors:
        seen.pop(tensor.untyped_storage().data_ptr(), None)
    del y
    return sum(seen.values())


def test_a_repeated_forward_is_the_first_one():
    tensors = given(together=True)

    def checkpointed(*given: torch.Tensor, **how) -> torch.Tensor:
        return checkpoint(lambda *args: at_once(*args, **how), *given, use_reentrant=False)

    found, right = ran(checkpointed, tensors, recipe="rowwise"), ran(at_once, tensors, recipe="rowwise")
    assert all(map(torch.equal, found, right))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("recipe", "together"),
    long_but([("tensorwise", True), ("blockwise", False)], itertools.product(FUSED, [True, False])),
)
def test_compiled_it_is_one_graph_without_swiglu(recipe, together):
    """SwiGLU is inside of the casts, which are nodes; both gradients with scales of groups are cast by one."""
    seen: list[str] = []

    def collect(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    tensors = given(together=together)
    backend = aot_autograd(fw_compiler=collect, bw_compiler=collect)
    found = ran(torch.compile(at_once, backend=backend, fullgraph=True), tensors, recipe=recipe)
    # On a CPU sums depend on strides, which compiled code has others of.
    right = ran(torch.compile(by_product, backend="aot_eager", fullgraph=True), tensors, recipe=recipe)
    assert all(map(torch.equal, found, right))
    one_launch = together or recipe in ("tensorwise", "rowwise")
    assert seen.count("f8sub.quantize_computed.default") == (2 if one_launch else 3)
    assert not any("silu" in name or "sigmoid" in name for name in seen)


def test_rows_of_gate_and_up_together_are_even():
    x, _, down = given(together=True)
    odd = torch.zeros(EXPERTS, 2 * HIDDEN + 1, WIDTH, dtype=torch.bfloat16)
    with pytest.raises(f8sub.Float8ShapeError, match=r"one weight of both, .* got \(4, 193, 64\)"):
        f8sub.grouped_swiglu(x, odd, None, down, ENDS)


@pytest.mark.parametrize("rows", [1, HIDDEN // 2])
@pytest.mark.parametrize("recipe", [None, "tensorwise"])
def test_gate_and_up_have_one_shape(recipe, rows):
    """One row of up would be multiplied by all of gate's."""
    x, gate, up, down = given(together=False)
    with pytest.raises(f8sub.Float8ShapeError, match="gate and up of one shape"):
        f8sub.grouped_swiglu(x, gate, up[:, :rows], down, ENDS, recipe)


class Experts(nn.Module):
    """A user's: gate and up in one weight."""

    def __init__(self) -> None:
        super().__init__()
        _, *weights = given(together=True)
        self.gate_up, self.down = map(nn.Parameter, weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return f8sub.grouped_swiglu(x, self.gate_up, None, self.down, ENDS)


@pytest.fixture
def experts(registered: None) -> Iterator[nn.Module]:  # noqa: F811
    """Converted ones."""
    f8sub.register_experts(Experts)
    yield f8sub.convert_to_float8(nn.Sequential(Experts()), experts=True)[0]
    gc.collect()


def test_a_module_has_its_recipe_and_is_watched_product_by_product(experts):
    """What looks at products sees each with its factors: the bits are the same."""
    x = given(together=True)[0]
    y = experts(x)
    assert type(y.grad_fn).__name__ == "GatedMatmulBackward"
    assert torch.equal(y, at_once(x, experts.gate_up, experts.down, recipe="tensorwise"))
    seen: list[calls.Multiplied] = []
    with calls.watching(lambda owner, made: seen.append(made)):
        assert torch.equal(experts(x), y)
    assert [made.y.shape[1] for made in seen] == [2 * HIDDEN, WIDTH]
    with f8sub.autocast(enabled=False):
        plain = experts(x)
    assert type(experts(x).grad_fn).__name__ == "GatedMatmulBackward"
    assert torch.equal(plain, at_once(x, experts.gate_up.detach(), experts.down.detach()))


class Product(nn.Module):
    """One weight of a user's experts."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return f8sub.grouped_linear(x, self.weight, ENDS)


class Apart(nn.Module):
    """A user's: each weight in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = map(Product, given(together=False)[1:])

    @property
    def weights(self) -> Tensors:
        return self.gate.weight, self.up.weight, self.down.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return at_once(x, *self.weights)


def test_weights_of_three_modules_are_repeated_as_they_ran(registered):  # noqa: F811
    """A context around the checkpointed function has been left when backward asks each module for its plan."""
    f8sub.register_experts(Product)
    experts = f8sub.convert_to_float8(Apart(), experts=True)

    def checkpointed(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        with f8sub.autocast("rowwise"):
            return checkpoint(experts, x, use_reentrant=False)

    tensors = given(together=False)[0], *experts.weights
    assert all(map(torch.equal, ran(checkpointed, tensors), ran(at_once, tensors, recipe="rowwise")))


@pytest.mark.parametrize("other", ["gate", "up", "down"])
def test_weights_of_three_modules_have_their_own_recipes(other, registered):  # noqa: F811
    f8sub.register_experts(Product)
    experts = f8sub.convert_to_float8(Apart(), {f"*{other}": "rowwise", "*": "tensorwise"}, experts=True)
    tensors = given(together=False)[0], *experts.weights
    assert all(map(torch.equal, ran(at_once, tensors), ran(by_product, tensors)))


def test_delayed_scaling_takes_each_product(registered):  # noqa: F811
    """With a past of each weight, which two steps compute the scales of."""

    class ByProduct(Experts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return by_product(x, self.gate_up, self.down)

    found = []
    for cls in (Experts, ByProduct):
        f8sub.register_experts(cls)
        experts = f8sub.convert_to_float8(nn.Sequential(cls()), "delayed", experts=True)[0]
        optimizer = torch.optim.SGD(experts.parameters(), lr=0.1)
        for _ in range(2):
            y = experts(given(together=True)[0][:-TAIL])
            y.backward(gaussian(tuple(y.shape), generator(5)).bfloat16())
            optimizer.step()
            f8sub.precompute_scales(experts)
        states = *experts.gate_up_scaling_states, *experts.down_scaling_states
        found.append([state.scale for state in states])
    assert all(scale.any() for scale in found[0])
    assert all(map(torch.equal, *found))


ARE_SWIGLU = ["none", "function"]
CHANGES = [*ARE_SWIGLU, "hook", "hook of gradients", "activation", "gate", "gate of one module"]


def first_half(self: nn.Module, both: torch.Tensor) -> torch.Tensor:
    return both.chunk(2, -1)[0]


def changed_experts(change: str) -> nn.Module:
    """Converted experts of transformers, of which something is another way."""
    model = of_transformers("qwen3_moe")
    plain = experts_of(model)[0]
    if change == "hook":
        plain.act_fn.register_forward_hook(lambda module, args, y: y * 2)
    elif change == "hook of gradients":
        plain.act_fn.register_full_backward_pre_hook(lambda module, dy: None)
    elif change == "activation":
        plain.act_fn = nn.GELU()
    elif change == "function":
        del plain.act_fn
        plain.act_fn = nn.functional.silu
    elif change == "gate":
        plain.__class__ = type("Gated", (type(plain),), {"_apply_gate": first_half})
    elif change == "gate of one module":
        plain._apply_gate = types.MethodType(first_half, plain)
    return experts_of(f8sub.convert_to_float8(model, experts=True))[0]


@pytest.mark.parametrize("change", CHANGES)
def test_experts_of_transformers_run_as_one_layer_where_theirs_is_swiglu(change):
    found = changed_experts(change)
    names: set[str] = set()
    x = gaussian((8, 32), generator(1)).bfloat16().requires_grad_()
    chosen = torch.tensor([[0, 1]] * 8), torch.full((8, 2), 0.5).bfloat16()
    y = found(x, *chosen)  # held: torch 2.11 forgets what a node knows with its result
    node = [y.grad_fn]
    while node:
        last = node.pop()
        names.add(type(last).__name__)
        node += [before for before, _ in last.next_functions if before is not None]
    assert ("GatedMatmulBackward" in names) == (change in ARE_SWIGLU)
    assert ("GroupedMatmulBackward" in names) == (change not in ARE_SWIGLU)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("change", long_but(["none"], CHANGES))
def test_compiled_they_do_so_too(change):
    """What eager code asks of a function, such as its name, traced code may answer otherwise."""
    seen: list[str] = []

    def collect(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    backend = aot_autograd(fw_compiler=collect, bw_compiler=collect)
    x = gaussian((8, 32), generator(1)).bfloat16().requires_grad_()
    chosen = torch.tensor([[0, 1]] * 8), torch.full((8, 2), 0.5).bfloat16()
    y = torch.compile(changed_experts(change), backend=backend)(x, *chosen)
    y.backward(gaussian(tuple(y.shape), generator(2)).to(y.dtype))
    assert seen.count("f8sub.quantize_computed.default") == (4 if change in ARE_SWIGLU else 0)
    assert seen.count("f8sub.quantize_groups.default") == (0 if change in ARE_SWIGLU else 4)


def test_gradients_of_tokens_are_read_by_their_place():
    """Autograd of an index sorts, or adds by atomics in another order each time."""
    model = f8sub.convert_to_float8(of_transformers("qwen3_moe"), experts=True)
    found = experts_of(model)[0]
    x = gaussian((9, 32), generator(1)).bfloat16().requires_grad_()
    rng = generator(2)
    chosen = torch.stack([torch.randperm(6, generator=rng)[:2] for _ in range(9)])
    weights = torch.rand(9, 2, generator=rng).bfloat16().requires_grad_()
    seen: list[torch.Tensor] = []
    hook = found.register_forward_hook(lambda module, args, y: seen.append(y))
    with calls.watching(lambda owner, made: seen.append(made.x)):
        y = found(x, chosen, weights)
    hook.remove()
    sent = seen[0]
    sent.retain_grad()
    names, node = set(), [y.grad_fn]
    while node:
        last = node.pop()
        names.add(type(last).__name__)
        node += [before for before, _ in last.next_functions if before is not None]
    assert not any("Index" in name for name in names)
    y.backward(gaussian(tuple(y.shape), generator(3)).bfloat16())
    order = chosen.flatten().argsort(stable=True)
    assert torch.equal(sent, x[order // 2])
    right = torch.zeros(9, 32, dtype=torch.float64).index_add_(0, order // 2, sent.grad.double())
    assert torch.equal(x.grad, right.bfloat16())


def test_no_tokens_at_all():
    model = f8sub.convert_to_float8(of_transformers("qwen3_moe"), experts=True)
    x = torch.zeros(0, 32, dtype=torch.bfloat16, requires_grad=True)
    chosen = torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.bfloat16)
    y = experts_of(model)[0](x, *chosen)
    y.backward(torch.zeros_like(y))
    assert y.shape == x.grad.shape == (0, 32)


class Doubled(Experts):
    """A subclass with a forward of its own, which no forward of the class it extends replaces."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * f8sub.grouped_swiglu(x, self.gate_up, None, self.down, ENDS)


def test_a_forward_that_is_registered_replaces_no_subclass_own(registered):  # noqa: F811
    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return 3 * f8sub.grouped_swiglu(x, module.gate_up, None, module.down, ENDS)

    class Alike(Experts):
        pass

    class Mixin(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 4 * at_once(x, self.gate_up, self.down)

    class Mixed(Mixin, Experts):
        pass

    f8sub.register_experts(Experts, forward=forward)
    f8sub.register_experts(Doubled)
    x = given(together=True)[0].detach()[:-TAIL]
    y = at_once(x, Experts().gate_up, Experts().down, recipe="tensorwise")
    for cls, factor in ((Experts, 3), (Alike, 3), (Doubled, 2)):
        model = f8sub.convert_to_float8(nn.Sequential(copy.deepcopy(cls())), experts=True)
        assert torch.equal(model(x), factor * y)
        assert seams.seam_of(model[0]).forward is (forward if factor == 3 else None)
    assert seams.seam_of(Mixed()) is None
