"""Ranks that were converted differently: a typed error on every rank, before anything can hang."""

import pytest
import torch

import f8sub
from f8sub.weights import checks
from tests.data_sets import gaussian, generator
from tests.models import BF16, Stack, refusal, replicated, seed_weights, shard
from tests.selection import long_but

# These ranks pretend to be different: what one test changes in the library, others must not find.
pytestmark = pytest.mark.own_ranks

E4M3_DY = f8sub.get_recipe("gridquant", dy=torch.float8_e4m3fn)
POLICY, DTYPE, VERSION = "policy", "dtype", "version"
OPTIONS = {
    "recipe": ({"recipe": "tensorwise"}, {"recipe": "rowwise"}, "recipe rowwise, fprop rowwise e4m3"),
    "format": ({"recipe": "gridquant"}, {"recipe": E4M3_DY}, "dgrad 256x256 e4m3 by"),
    "all-gather": ({}, {"float8_all_gather": False}, "float8_all_gather False"),
    "backend": ({}, {"backend": "reference"}, "backends reference"),
    "keep_x": ({"keep_x": "float8"}, {"keep_x": "high_precision"}, "keep_x high_precision"),
    "primary": ({}, {"primary_weights": True}, "primary_weights True"),
    "skip": ({}, {"skip": ("layers.1",)}, "layer none further"),
    "filter": ({}, {"filter_fn": lambda module, fqn: "0" not in fqn}, "layer layers.1"),
    VERSION: ({}, {}, "f8sub 0.0.9."),
    DTYPE: ({}, {}, "dtype torch.bfloat16."),
    POLICY: ({}, {}, "param_dtype torch.bfloat16."),
}
"""What the usual ranks and the odd one are converted with, and what is told of that."""
CASES = [*((option, True) for option in OPTIONS), ("recipe", False), ("primary", False), (POLICY, False)]
"""Whether it shows in precompute_scales, and not in the first forward."""


def converted(rank: int, world: int, option: str, precompute: bool) -> str:
    """The error; the last rank is the odd one."""
    usual, odd, _ = OPTIONS[option]
    differing = option if rank == world - 1 else None
    if differing == VERSION:
        checks.__version__ = "0.0.9"
    model = seed_weights(Stack(64, 96, 64)).to(torch.bfloat16 if differing == DTYPE else torch.float32)
    f8sub.convert_to_float8(model, **(odd if differing else usual))
    shard(model, BF16 if differing == POLICY else None)
    call, given = model, gaussian((16, 64), generator(1))
    if precompute:
        call, given = f8sub.precompute_scales, model
    return refusal(f8sub.Float8RankMismatchError, call, given)


@pytest.mark.parametrize(("option", "precompute"), long_but(CASES[:-2], CASES))
def test_a_rank_that_differs(ranks, option, precompute):
    text, *others = ranks(3, converted, option, precompute)
    assert others == [text] * 2
    assert "ranks 0, 1: " in text
    assert "layers." in text
    told = text.partition("rank 2: ")[2]
    assert told.startswith(OPTIONS[option][2]) or f", {OPTIONS[option][2]}" in told


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize("replicas", [2, 4], ids=["2-replicas-of-2-shards", "4-replicas-of-1-shard"])
def test_a_replica_that_differs_is_not_averaged_with_the_others(rank, world, replicas):
    """The last replica is converted another way, all of it."""
    odd = {2: "ranks 2, 3: ", 4: "rank 3: "}[replicas]
    recipe = "rowwise" if rank >= world - world // replicas else "tensorwise"
    model = shard(
        f8sub.convert_to_float8(seed_weights(Stack(64, 96, 64)), recipe=recipe), mesh=replicated(replicas)
    )
    text = refusal(f8sub.Float8RankMismatchError, model, gaussian((16, 64), generator(1)))
    assert f"{odd}recipe rowwise" in text
