"""What is kept of x under FSDP2: it makes no difference to numbers, and nothing of the weight is kept beside it."""

import functools

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import f8sub
from tests import oracle
from tests.data_sets import gaussian, generator
from tests.kept_x import Blocks, model_of, trained
from tests.layers import on_each_recipe
from tests.linear.test_saved_bytes import Saved, bytes_of_saved, leaf
from tests.models import BF16, Stack, equal, refusal, seed_weights, shard

CASES = [
    ("gridquant", "recompute", "usual"),
    *((recipe, "high_precision", "usual") for recipe in ("delayed", "rowwise", "blockwise", "mxfp8")),
    ("tensorwise", "auto", "checkpointed"),
    pytest.param("delayed", "high_precision", "compiled", marks=pytest.mark.long),
]


def _trained(rank: int, world: int, recipe: str, way: str, mode: str) -> bool:
    results = []
    for keep_x in (way, "float8"):
        model = model_of(recipe, keep_x, Blocks(2))
        if mode == "compiled" and keep_x == way:
            for block in model.blocks:
                block.compile(backend="aot_eager", fullgraph=True)
        f8sub.precompute_scales(shard(model, BF16))
        run = functools.partial(checkpoint, model, use_reentrant=False) if mode == "checkpointed" else model
        results.append([t.full_tensor() if hasattr(t, "full_tensor") else t for t in trained(model, run)])
    return equal(*results)


@pytest.mark.parametrize(("recipe", "way", "mode"), CASES)
def test_what_is_kept_makes_no_difference(ranks, recipe, way, mode):
    assert ranks(2, _trained, recipe, way, mode) == [True, True]


def _differently(rank: int, world: int) -> str:
    model = model_of("tensorwise", ("float8", "high_precision")[rank])
    fully_shard(model)
    return refusal(f8sub.Float8RankMismatchError, f8sub.precompute_scales, model)


def test_ranks_that_keep_different_things_are_told_so(ranks):
    for message in ranks(2, _differently):
        assert "keep_x" in message
        assert "high_precision" in message


def _sharded(rank: int, world: int, recipe: str) -> tuple[int, int]:
    model = f8sub.convert_to_float8(seed_weights(Stack(64, 96)), recipe=recipe)
    model = shard(model)
    x = leaf(24, 64)
    f8sub.precompute_scales(model)
    saved = Saved(lambda: model(x), [])
    codes = oracle.TORCH_DTYPES[oracle.spec_of(recipe, "x").format], torch.uint8
    counted = saved.bytes_in(*codes), saved.bytes
    saved.y.backward(gaussian(tuple(saved.y.shape), generator(3)))
    return counted


@on_each_recipe
def test_under_fsdp_all_that_is_left_of_the_weight_after_forward_is_its_shard(ranks, recipe):
    """Unsharded codes that autograd saw are FSDP's to free; the shard in high precision is a parameter."""
    of_x, spec = bytes_of_saved(leaf(24, 64), recipe), oracle.spec_of(recipe, "x")
    for codes, everything in ranks(2, _sharded, recipe):
        assert codes == (0 if f8sub.get_recipe(recipe).wgrad.b is None else spec.code_bytes(64, 24))
        assert everything <= of_x + oracle.spec_of(recipe, "w").scale_bytes(96, 64) + 96 * 64 * 4 // 2
