"""What is kept of x makes no difference to numbers under FSDP2."""

import functools

import pytest
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import f8sub
from tests.kept_x import Blocks, model_of, same, trained
from tests.models import BF16, refusal, shard

HIGH = ("tensorwise", "delayed", "rowwise", "blockwise", "gridquant", "mxfp8")
CASES = [
    *((recipe, "recompute", "usual") for recipe in ("tensorwise", "gridquant")),
    *((recipe, "high_precision", "usual") for recipe in HIGH),
    *((recipe, "auto", "usual") for recipe in ("tensorwise", "delayed")),
    ("tensorwise", "auto", "checkpointed"),
    ("delayed", "high_precision", "checkpointed"),
    pytest.param("delayed", "high_precision", "compiled", marks=pytest.mark.long),
]


def _sharded(rank: int, world: int, recipe: str, way: str, mode: str) -> bool:
    results = []
    for keep_x in (way, "float8"):
        model = model_of(recipe, keep_x, Blocks(2))
        if mode == "compiled" and keep_x == way:
            for block in model.blocks:
                block.compile(backend="aot_eager", fullgraph=True)
        f8sub.precompute_scales(shard(model, BF16))
        run = functools.partial(checkpoint, model, use_reentrant=False) if mode == "checkpointed" else model
        results.append([t.full_tensor() if hasattr(t, "full_tensor") else t for t in trained(model, run)])
    return same(*results)


@pytest.mark.parametrize(("recipe", "way", "mode"), CASES)
def test_what_is_kept_makes_no_difference(ranks, recipe, way, mode):
    assert ranks(2, _sharded, recipe, way, mode) == [True, True]


def _differently(rank: int, world: int) -> str:
    model = model_of("tensorwise", ("float8", "high_precision")[rank])
    fully_shard(model)
    return refusal(f8sub.Float8RankMismatchError, f8sub.precompute_scales, model)


def test_ranks_that_keep_different_things_are_told_so(ranks):
    for message in ranks(2, _differently):
        assert "keep_x" in message
        assert "high_precision" in message
