"""torch.compile of experts: one graph without breaks, eager's results, and the products are nodes of it."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import f8sub
from tests.budgets import decibels
from tests.compiling import Compiler, SavedShapes
from tests.data_sets import gaussian, generator
from tests.experts.models import OwnExperts, experts_of, of_transformers
from tests.experts.test_conversion import converted, losses_and_gradients, registered  # noqa: F401
from tests.selection import long_but, of_torchtitan_0_3

pytestmark = pytest.mark.usefixtures("fresh_compiler")

RECIPES = long_but(
    ["blockwise"], ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "delayed"]
)
WIDTH, HIDDEN, EXPERTS = 32, 48, 3
ENDS = [5, 5, 16]


def own(recipe: str = "rowwise") -> nn.Module:
    """A user's experts, with rows past the last group in what they are called with."""
    return converted(nn.Sequential(OwnExperts(EXPERTS, WIDTH, HIDDEN).bfloat16()), recipe)[0]


def ran(experts: nn.Module, call: Callable[..., torch.Tensor], ends: list[int]) -> list[torch.Tensor]:
    """y, and the gradients of x and of the weights."""
    x = gaussian((ends[-1] + 3, WIDTH), generator(5)).bfloat16().requires_grad_()
    y = call(x, torch.tensor(ends))
    found = [x, *experts.parameters()]
    return [y.detach(), *torch.autograd.grad(y, found, gaussian(tuple(y.shape), generator(6)).bfloat16())]


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_are_one_graph_and_compute_what_eager_ones_do(recipe):
    compiler, experts = Compiler(), own(recipe)
    found = ran(experts, torch.compile(experts, backend=compiler, fullgraph=True), ENDS)
    assert all(map(torch.equal, found, ran(experts, experts, ENDS)))
    assert compiler.graphs == 1


class OneLayer(OwnExperts):
    """The same experts, whose products are one function of gate, up and down."""

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return f8sub.grouped_swiglu(x, self.gate, self.up, self.down, ends)


@pytest.mark.parametrize("kind", [OwnExperts, OneLayer])
def test_a_forward_without_gradients(kind):
    """As of an evaluation."""
    f8sub.register_experts(kind)
    experts = converted(nn.Sequential(kind(EXPERTS, WIDTH, HIDDEN).bfloat16()), "rowwise")[0]
    x, ends = gaussian((ENDS[-1] + 3, WIDTH), generator(5)).bfloat16(), torch.tensor(ENDS)
    with torch.no_grad():
        found = torch.compile(experts, backend="aot_eager", fullgraph=True)(x, ends)
        assert torch.equal(found, experts(x, ends))


def test_products_are_nodes_of_the_graph():
    """Else compiled code would train in high precision unnoticed."""
    seen: list[str] = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        from torch._dynamo.backends.common import aot_autograd

        def collect(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
            seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            return graph

        return aot_autograd(fw_compiler=collect, bw_compiler=collect)(module, inputs)

    experts = own()
    ran(experts, torch.compile(experts, backend=backend, fullgraph=True), ENDS)
    assert seen.count("f8sub.grouped_rows.default") == 6
    assert seen.count("f8sub.grouped_weights.default") == 3
    assert not any("_grouped_mm" in name for name in seen)


def test_numbers_of_tokens_that_change_are_compiled_once_more():
    compiler, experts = Compiler(), own("blockwise")
    call = torch.compile(experts, backend=compiler, fullgraph=True)
    for ends in ([5, 5, 16], [7, 100, 130], [0, 1, 300], [128, 128, 256], [1, 1, 1]):
        assert all(map(torch.equal, ran(experts, call, ends), ran(experts, experts, ends)))
    assert compiler.graphs <= 3
    assert compiler.floats == []


@pytest.mark.long
def test_the_compilers_own_fusions_change_little():
    """Of casts that have a state, too."""
    experts = own("delayed")
    found = ran(experts, torch.compile(experts, fullgraph=True), ENDS)
    for a, b in zip(ran(experts, experts, ENDS), found, strict=True):
        assert decibels(a, b) >= 20


def test_a_byte_an_element_is_saved():
    """Of x once for gate and up together, of h once; of weights rowwise codes, which eager code keeps, too."""
    experts = own("rowwise")
    x = gaussian((ENDS[-1] + 3, WIDTH), generator(5)).bfloat16().requires_grad_()
    call = torch.compile(experts, backend="aot_eager", fullgraph=True)
    saved = SavedShapes(lambda: call(x, torch.tensor(ENDS)))
    weights = {weight.data_ptr() for weight in experts.parameters()}
    of_weights = [entry for entry in saved.of_size(EXPERTS * WIDTH * HIDDEN) if entry[2] not in weights]
    assert {entry[:2] for entry in of_weights} <= {
        (tuple(weight.shape), torch.float8_e4m3fn) for weight in experts.parameters()
    }
    assert [shape for shape, _, _ in saved.of_size(len(x) * WIDTH)] == [(WIDTH, len(x))]
    one_byte = [shape for shape, dtype, _ in saved.of_size(len(x) * HIDDEN) if dtype.itemsize == 1]
    assert one_byte == [(HIDDEN, len(x))]


MODELS = [("qwen3_moe", False), ("qwen3_moe", True), ("deepseek_v3", False), ("gpt_oss", True)]


@pytest.mark.parametrize(("kind", "whole"), long_but([], MODELS))
def test_models_of_transformers(kind, whole):
    pytest.importorskip("transformers")
    model, compiled = (converted(of_transformers(kind)) for _ in range(2))
    for module in [compiled] if whole else experts_of(compiled):
        module.compile(backend="aot_eager", fullgraph=True)
    (loss, gradients), (expected, theirs) = losses_and_gradients(compiled), losses_and_gradients(model)
    assert torch.equal(loss, expected)
    assert gradients.keys() == theirs.keys()
    assert [name for name, value in gradients.items() if not torch.equal(value, theirs[name])] == []


@pytest.mark.parametrize("recipe", long_but(["rowwise"], ["rowwise", "delayed"]))
def test_torchtitans_experts(recipe):
    module = of_torchtitan_0_3("torchtitan.models.common.moe")
    if not hasattr(module.GroupedExperts, "_grouped_mm"):
        pytest.skip("torchtitan 0.2 has no seam")
    plain = module.GroupedExperts(
        module.GroupedExperts.Config(dim=WIDTH, hidden_dim=HIDDEN, num_experts=EXPERTS)
    )
    rng = generator(4)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(0.2 * gaussian(tuple(parameter.shape), rng))
    plain = plain.bfloat16()
    found = []
    for compiles in (False, True):
        model = converted(copy.deepcopy(plain), recipe)
        if compiles:
            model.compile(backend="aot_eager", fullgraph=True)
        x = gaussian((18, WIDTH), generator(5)).bfloat16().requires_grad_()
        y = model(x, torch.tensor([5, 0, 11]))
        y.backward(gaussian((18, WIDTH), generator(6)).bfloat16())
        found.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))


def test_grouped_linear_by_itself():
    """With a recipe of its own, in high precision without one."""
    w = gaussian((EXPERTS, HIDDEN, WIDTH), generator(2)).bfloat16().requires_grad_()
    for recipe in ("rowwise", None):

        def call(x: torch.Tensor, ends: torch.Tensor, recipe=recipe) -> torch.Tensor:
            return f8sub.grouped_linear(x, w, ends, recipe, backend="reference" if recipe else "auto")

        found = []
        for one in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
            x = gaussian((19, WIDTH), generator(5)).bfloat16().requires_grad_()
            y = one(x, torch.tensor(ENDS))
            dy = gaussian((19, HIDDEN), generator(6)).bfloat16()
            found.append([y.detach(), *torch.autograd.grad(y, (x, w), dy)])
        assert all(map(torch.equal, *found))
