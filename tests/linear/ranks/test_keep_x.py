"""What is kept of x makes no difference to numbers under FSDP2."""

import functools

import pytest
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import f8sub
from tests.kept_x import Blocks, model_of, same, trained
from tests.models import BF16, refusal

CASES = [("tensorwise", "recompute"), ("gridquant", "recompute")]
CASES += [
    (r, "high_precision") for r in ("tensorwise", "delayed", "rowwise", "blockwise", "gridquant", "mxfp8")
]
CASES += [("tensorwise", "auto"), ("delayed", "auto")]
on_each_case = pytest.mark.parametrize(("recipe", "way"), CASES, ids=["-".join(case) for case in CASES])


def _sharded(rank: int, world: int, recipe: str, way: str, policy, compiled: bool, checkpointed: bool):
    results = []
    for keep_x in (way, "float8"):
        model = model_of(recipe, keep_x, Blocks(2))
        for block in model.blocks:
            if compiled and keep_x == way:
                block.compile(backend="aot_eager", fullgraph=True)
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        f8sub.precompute_scales(model)
        run = functools.partial(checkpoint, model, use_reentrant=False) if checkpointed else model
        found = trained(model, run)
        results.append([t.full_tensor() if hasattr(t, "full_tensor") else t for t in found])
    return same(*results)


@on_each_case
def test_fully_shard(ranks, recipe, way):
    assert ranks(2, _sharded, recipe, way, BF16, False, False) == [True, True]


@pytest.mark.parametrize(("recipe", "way"), [("tensorwise", "auto"), ("delayed", "high_precision")])
def test_fully_shard_checkpointed(ranks, recipe, way):
    assert ranks(2, _sharded, recipe, way, BF16, False, True) == [True, True]


@pytest.mark.long
def test_fully_shard_compiled(ranks):
    assert ranks(2, _sharded, "delayed", "high_precision", BF16, True, False) == [True, True]


def _differently(rank: int, world: int) -> str:
    model = model_of("tensorwise", ("float8", "high_precision")[rank])
    fully_shard(model)
    return refusal(f8sub.Float8RankMismatchError, f8sub.precompute_scales, model)


def test_ranks_that_keep_different_things_are_told_so(ranks):
    for message in ranks(2, _differently):
        assert "keep_x" in message
        assert "high_precision" in message
