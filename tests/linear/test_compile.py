"""torch.compile, unsharded: one graph a block, bitwise eager's results, no recompilation, nothing more saved.

Batches and sequences that change their length are compiled once or twice.
"""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

import f8sub
from f8sub.kernels.gemm import select
from tests import oracle
from tests.budgets import decibels
from tests.compiling import (
    HIDDEN,
    SHAPES,
    WIDTH,
    Compiler,
    SavedShapes,
    compile_blocks,
    differences,
    gained,
    mlps,
    train,
)
from tests.counting import FLOAT8
from tests.data_sets import gaussian, generator
from tests.layers import RECIPES, Block, in_float8
from tests.models import Transformer, seed_weights
from tests.selection import long_but

AUTOCAST = functools.partial(torch.autocast, "cpu", torch.bfloat16)
MODES = {"fp32": {}, "bf16": {"autocast": AUTOCAST}}
QUICK = ("tensorwise", "blockwise")
"""Casts that the compiler fuses, and casts that are one node of the graph."""
on_each_recipe = pytest.mark.parametrize("recipe", long_but(QUICK, RECIPES))
on_each_kind = pytest.mark.parametrize("recipe", long_but(["blockwise"], ["blockwise", "delayed"]))
"""Where only the kind of cast matters: those that are one node, and those that are fused and have a state."""
IN_MODES = [(recipe, "fp32" if recipe in ("rowwise", "delayed") else "bf16") for recipe in RECIPES]
IN_MODES = long_but([(recipe, "bf16") for recipe in QUICK], IN_MODES)
on_each_recipe_and_mode = pytest.mark.parametrize(("recipe", "mode"), IN_MODES)

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@on_each_recipe_and_mode
def test_aot_eager_is_bitwise_eager(recipe, mode):
    eager = train(mlps(recipe), **MODES[mode])
    assert eager.graphs[-1] == 0
    compiled = train(compile_blocks(mlps(recipe)), **MODES[mode])
    assert compiled.graphs[0] > 0
    assert differences(compiled, eager) == []
    plain = train(mlps(None), **MODES[mode])
    assert differences(plain, eager) != []


@on_each_kind
def test_equal_blocks_are_compiled_once(recipe):
    """Siblings below a block too, more blocks than dynamo compiles one function for."""
    blocks = torch._dynamo.config.recompile_limit + 1
    model = nn.Sequential(*[nn.Sequential(block) for block in mlps(None, blocks).blocks])
    f8sub.convert_to_float8(model, recipe=recipe)
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    y = model(gaussian((2, WIDTH), generator(1)).requires_grad_())
    y.backward(gaussian((2, WIDTH), generator(2)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@on_each_kind
def test_the_whole_model_is_one_graph(recipe):
    """A transformer, attention and all: neither the check across ranks at its root nor siblings break it."""
    model = f8sub.convert_to_float8(seed_weights(Transformer(blocks=1)), recipe=recipe)
    expected = model(gaussian((2, 12, WIDTH), generator(1)))
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(gaussian((2, 12, WIDTH), generator(1))), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@on_each_kind
def test_a_changed_weight_is_seen_without_recompiling(recipe):
    model = mlps(recipe)
    twin = copy.deepcopy(model)
    compile_blocks(model)
    x = gaussian((2, 12, WIDTH), generator(1))
    model(x)
    changes = (lambda w: w.mul_(2), lambda w: w[1:3].fill_(3.0), lambda w: w.copy_(w.flip(0)))
    for change in changes:
        with torch.no_grad():
            for changed in (model, twin):
                change(changed.blocks[0].up.weight)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert torch.equal(model(x), twin(x))


K, N, M = 64, 208, 24
"""No two tensors of the test below have K * N elements, the weight and its copies aside."""


@on_each_recipe_and_mode
def test_no_copy_of_the_weight_is_saved_for_backward(recipe, mode):
    model = seed_weights(nn.Sequential(nn.Linear(K, N, bias=False)))
    f8sub.convert_to_float8(model, recipe=recipe)
    weight = model[0].weight
    model.compile(backend="aot_eager", fullgraph=True)
    x = gaussian((M, K), generator(1)).requires_grad_()

    def forward() -> torch.Tensor:
        with MODES[mode].get("autocast", lambda: torch.autocast("cpu", enabled=False))():
            return model(x)

    saved = SavedShapes(forward)
    copies = [entry for entry in saved.of_size(K * N) if entry[2] != weight.data_ptr()]
    # Rowwise codes, which eager keeps too, until the weight changes; no transposed ones, no high precision.
    assert [entry[:2] for entry in copies] in ([], [((N, K), torch.float8_e4m3fn)])
    assert [t for t in saved.tensors if t.shape == (K, N)] == []
    assert saved.tensors


def test_backward_finds_no_amax_of_the_weight_again():
    """Of the last layer, too: torch 2.15 does not merge what forward alone needs with what backward does.

    Each is found by rows, then of these: Inductor of torch 2.11 reduces rows alone in the kernel that computes them.
    """
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    dims = []

    def seen(graph, inputs):
        nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.amax.default)
        dims.append([list(node.args[1]) for node in nodes])
        return make_boxed_func(graph.forward)

    model = f8sub.convert_to_float8(seed_weights(nn.Sequential(nn.Linear(K, N))), recipe="tensorwise")
    partition = min_cut_rematerialization_partition
    model.compile(backend=aot_autograd(fw_compiler=seen, bw_compiler=seen, partition_fn=partition))
    x = gaussian((M, K), generator(1)).requires_grad_()
    model(x).backward(gaussian((M, N), generator(2)))
    by_rows = [[1], [0, 1]]
    assert dims == [2 * by_rows, by_rows]  # of x and w; of dy


@on_each_recipe
def test_x_is_saved_in_float8_once_for_siblings(recipe):
    """Common subexpressions are merged: gate and up save one byte an element of x between them.

    With delayed scaling each has a scale of its own, which eager code knows to be the same and a graph does not.
    """
    model = compile_blocks(mlps(recipe))
    x = gaussian((2, 12, WIDTH), generator(1)).requires_grad_()
    saved = SavedShapes(lambda: model.blocks[0](x))
    tokens = 2 * 12
    packed = tokens // oracle.spec_of(recipe, "x").codes_per_byte
    float8 = {t.data_ptr(): t.numel() for t in saved.tensors if t.dtype in FLOAT8 and packed in t.shape}
    # x of gate and up, x of down.
    in_codes = in_float8(recipe)["dw"]
    of_siblings = [packed * WIDTH] * (1 if f8sub.get_recipe(recipe).delayed is None else 2)
    # torch 2.15 casts it again in backward: what it is computed from, gate's and up's outputs, is saved anyway.
    of_down = [] if recipe == "rowwise" and torch.__version__ >= TorchVersion("2.15") else [packed * HIDDEN]
    assert sorted(float8.values()) == (sorted([*of_siblings, *of_down]) if in_codes else [])
    high_precision = [t for t in saved.tensors if t.dtype == torch.float32 and t.numel() == tokens * HIDDEN]
    assert len(high_precision) <= 2 + (not in_codes)  # gate's and up's outputs, for their product; x of down


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "mode"), [("tensorwise", "bf16"), ("rowwise", "fp32")])
def test_inductor_is_as_close_to_high_precision_as_eager(recipe, mode):
    """Inductor keeps float32 between fused operators, so codes near a boundary differ: other noise, not more."""
    plain, eager = train(mlps(None)), train(mlps(recipe), **MODES[mode])
    compiled = train(compile_blocks(mlps(recipe), "inductor"), **MODES[mode])
    assert compiled.graphs[-1] == compiled.graphs[1]
    of_eager = decibels(plain.outputs[0], eager.outputs[0])
    assert decibels(plain.outputs[0], compiled.outputs[0]) >= of_eager - 0.5
    for i, signal in enumerate(plain.gradients[: len(plain.parameters)]):
        assert decibels(signal, compiled.gradients[i]) >= decibels(signal, eager.gradients[i]) - 1.5
    if mode == "fp32":
        assert decibels(eager.outputs[0], compiled.outputs[0]) >= 40


SHORT = [("True", "tensorwise")]
CASES = [*SHORT, ("None", "mxfp8"), ("marked", "blockwise"), ("True", "delayed")]
"""Ways to shapes that change (``dynamic=True``, ``dynamic=None``, ``mark_dynamic``), each with a recipe."""


@pytest.mark.parametrize(("mode", "recipe"), long_but(SHORT, CASES))
def test_lengths_that_change(mode, recipe):
    """No float that f8sub reads is an input of the graph: two layers could not share it, and it would not be folded."""
    eager = train(gained(recipe), steps=5, shapes=SHAPES)
    compiler = Compiler()
    model = compile_blocks(gained(recipe), compiler, dynamic=True if mode == "True" else None)
    compiled = train(model, steps=5, shapes=SHAPES, marked=mode == "marked")
    assert differences(compiled, eager) == []
    assert compiler.floats == []
    # Delayed scaling is compiled once more when its scales are made, the others without a hint for the first shape.
    assert compiler.graphs == (2 if mode == "None" or recipe == "delayed" else 1)


@pytest.mark.long
def test_floats_that_users_choose():
    """Those of two blocks differ: of the second one dynamo takes what it reads by the same names for dynamic."""
    model = nn.Sequential(Block(), Block()).bfloat16()
    recipes = {f"{i}.*": f8sub.get_recipe("delayed", margin=i + 0.5, dy_margin=i + 4.5) for i in range(2)}
    f8sub.convert_to_float8(seed_weights(model), recipes)
    twin, compiler = copy.deepcopy(model), Compiler()
    for block in model:
        block.compile(backend=compiler, fullgraph=True)
    results = []
    for each in (model, twin):
        y = each(gaussian((5, WIDTH), generator(1)).bfloat16())
        y.backward(gaussian((5, WIDTH), generator(2)).bfloat16())
        results.append([y, *(parameter.grad for parameter in each.parameters())])
    assert all(torch.equal(found, right) for found, right in zip(*results, strict=True))
    assert compiler.floats == []


@pytest.fixture
def row_major(monkeypatch):
    """GEMMs that read row-major operands alone, as on Hopper, of the CPU's, which read anything."""
    for module in select.GEMM.values():
        monkeypatch.setattr(module, "takes_any_layout", lambda device: False)
    select.Plan.make.cache_clear()
    yield
    select.Plan.make.cache_clear()


@pytest.mark.parametrize("recipe", long_but(["rowwise"], ["rowwise", "delayed", "blockwise"]))
def test_row_major_operands_are_bitwise_eagers(recipe, row_major):
    eager = train(mlps(recipe), steps=3)
    compiled = train(compile_blocks(mlps(recipe)), steps=3)
    assert compiled.graphs[0] > 0
    assert differences(compiled, eager) == []


def test_a_single_token_of_row_major_operands(row_major):
    """Bitwise here alone: of one row a CPU's product depends on how the other operand lies in memory."""
    shapes = [(2, 1), (1, 1), (3, 1)]
    eager = train(gained("mxfp8"), shapes=shapes)
    compiled = train(compile_blocks(gained("mxfp8"), dynamic=True), shapes=shapes)
    assert differences(compiled, eager) == []
