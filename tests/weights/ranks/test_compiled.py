"""torch.compile under DDP and FSDP2: one graph a block, bitwise eager, no recompilation, nothing more saved."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import f8sub
from tests.compiling import SHAPES, Compiler, SavedShapes, compile_blocks, differences, gained, mlps, train
from tests.data_sets import gaussian, generator
from tests.models import BF16, seed_weights, shard
from tests.wires import ONE_RECIPE_A_WIRE, on_each

RECIPES = ONE_RECIPE_A_WIRE
on_each_recipe = on_each(RECIPES)
POLICIES = {"fp32": None, "bf16": BF16}
K, N, M = 64, 208, 24
"""No two tensors saved by one layer have K * N elements, the weight and its copies aside."""


def under(wrapper: str, recipe: str, policy: str, *, compiled: bool, all_gather: bool = True) -> nn.Module:
    model = f8sub.convert_to_float8(mlps(None), recipe=recipe, float8_all_gather=all_gather)
    if compiled:
        compile_blocks(model)
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    return shard(model, POLICIES[policy])


def steps(rank: int, world: int, wrapper: str, recipe: str, policy: str, all_gather: bool) -> dict:
    """What differs between an eager and a compiled run, and the graphs compiled by the end of each step."""
    torch._dynamo.reset()
    eager = train(under(wrapper, recipe, policy, compiled=False, all_gather=all_gather), steps=4, rank=rank)
    torch._dynamo.utils.counters.clear()
    compiled = train(under(wrapper, recipe, policy, compiled=True, all_gather=all_gather), steps=4, rank=rank)
    return {"differences": differences(compiled, eager), "graphs": compiled.graphs, "eager": eager.graphs}


CASES = {
    "ddp": ("ddp", "fp32", True),
    "fsdp-fp32": ("fsdp", "fp32", True),
    "fsdp-bf16": ("fsdp", "bf16", True),
    "fsdp-high-precision-gather": ("fsdp", "bf16", False),
}


QUICK = {("rowwise", "fsdp-bf16")}
OTHERS = [(recipe, "fsdp-bf16") for recipe in RECIPES if (recipe, "fsdp-bf16") not in QUICK]
OTHERS += [("rowwise", "ddp"), ("tensorwise", "fsdp-fp32"), ("rowwise", "fsdp-high-precision-gather")]


@pytest.mark.parametrize(
    ("recipe", "case"), [*sorted(QUICK), *(pytest.param(*other, marks=pytest.mark.long) for other in OTHERS)]
)
def test_compiled_blocks_are_bitwise_eager_and_never_recompile(ranks, recipe, case):
    wrapper, policy, all_gather = CASES[case]
    for found in ranks(2, steps, wrapper, recipe, policy, all_gather):
        assert found["differences"] == []
        assert found["eager"] == [0] * 4
        assert found["graphs"][0] > 0
        assert found["graphs"][2:] == [found["graphs"][1]] * 2


def lengths(rank: int, world: int, recipe: str) -> tuple[list[str], int, list[str]]:
    """What differs from an eager run where each rank has batches and sequences of its own, and what was compiled."""
    torch._dynamo.reset()
    shapes = SHAPES[rank:] + SHAPES[:rank]
    eager = train(shard(gained(recipe), None), steps=5, rank=rank, shapes=shapes)
    compiler = Compiler()
    model = shard(compile_blocks(gained(recipe), compiler, dynamic=True), None)
    compiled = train(model, steps=5, rank=rank, shapes=shapes)
    return differences(compiled, eager), compiler.graphs, compiler.floats


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["tensorwise"])
def test_lengths_that_change(ranks, recipe):
    assert ranks(2, lengths, recipe, timeout=90.0) == [([], 1, [])] * 2


def saved_under(rank: int, world: int, wrapper: str, recipe: str) -> tuple[list, list, bool]:
    """Shapes and dtypes of the weight's size saved by a compiled layer, the transposed ones first."""
    torch._dynamo.reset()
    model = seed_weights(nn.Sequential(nn.Linear(K, N, bias=False)))
    model = f8sub.convert_to_float8(model, recipe=recipe)
    model.compile(backend="aot_eager", fullgraph=True)
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model)
    f8sub.precompute_scales(model)
    x = gaussian((M, K), generator(1)).requires_grad_()
    saved = SavedShapes(lambda: model(x))
    whole = [entry[:2] for entry in saved.of_size(K * N)]
    transposed = [entry for entry in whole if entry[0] == (K, N)]
    saved.y.backward(gaussian((M, N), generator(2)))
    return transposed, whole, bool(x.grad.isfinite().all())


@pytest.mark.parametrize(
    ("recipe", "wrapper"),
    [
        ("tensorwise", "fsdp"),
        *(pytest.param(recipe, "fsdp", marks=pytest.mark.long) for recipe in RECIPES[1:]),
        pytest.param("rowwise", "ddp", marks=pytest.mark.long),
    ],
)
def test_no_transposed_weight_is_saved_for_backward(ranks, recipe, wrapper):
    for transposed, whole, finite in ranks(2, saved_under, wrapper, recipe):
        assert transposed == []
        # The weight itself (a parameter, or codes that FSDP2 frees and gathers again) and at most its rowwise codes.
        assert len(whole) <= 2
        assert all(shape == (N, K) for shape, _ in whole)
        assert finite
