"""torch.compile under DDP and FSDP2: one graph a block, bitwise eager, no recompilation, nothing more saved."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import f8sub
from tests.compiling import SavedShapes, compile_blocks, differences, mlps, train
from tests.data_sets import gaussian, generator
from tests.dist.models import BF16, seed_weights, shard
from tests.dist.wires import ONE_RECIPE_A_WIRE

RECIPES = ONE_RECIPE_A_WIRE
on_each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=RECIPES)
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


LONG = {"fsdp-fp32", "fsdp-high-precision-gather"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.long] if case in LONG else []) for case in CASES],
    ids=list(CASES),
)
@on_each_recipe
def test_compiled_blocks_are_bitwise_eager_and_never_recompile(ranks, recipe, case):
    wrapper, policy, all_gather = CASES[case]
    for found in ranks(2, steps, wrapper, recipe, policy, all_gather, timeout=90.0):
        assert found["differences"] == []
        assert found["eager"] == [0] * 4
        assert found["graphs"][0] > 0
        assert found["graphs"][2:] == [found["graphs"][1]] * 2


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


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"], ids=str)
@on_each_recipe
def test_no_transposed_weight_is_saved_for_backward(ranks, recipe, wrapper):
    for transposed, whole, finite in ranks(2, saved_under, wrapper, recipe, timeout=90.0):
        assert transposed == []
        # The weight itself (a parameter, or codes that FSDP2 frees and gathers again) and at most its rowwise codes.
        assert len(whole) <= 2
        assert all(shape == (N, K) for shape, _ in whole)
        assert finite
