"""One rank does something alone in the middle of a run: nobody waits, and the losses stay right."""

import datetime

import pytest
import torch

import f8sub
from f8sub.weights import agreement
from tests.data_sets import gaussian, generator
from tests.models import Stack, seed_weights, shard, silenced, take_step
from tests.selection import long_but

STEPS, STEP = 8, 4
CASES = [("tensorwise", 2, "calls"), ("mxfp8", 1, "writes"), ("delayed", 0, "forgets")]
MORE = [("tensorwise", 2, "forgets"), ("tensorwise", 2, "writes"), ("delayed", 0, "calls")]


def run(rank: int, world: int, recipe: str, kind: str, odd: int) -> list[float]:
    """Every loss; rank ``odd`` alone does what ``kind`` says at step ``STEP``."""
    agreement.PATIENCE = datetime.timedelta(milliseconds=100)  # however long ranks wait, the losses are right
    model = shard(f8sub.convert_to_float8(seed_weights(Stack(32, 48, 32)), recipe=recipe))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    f8sub.precompute_scales(model)
    losses: list[float] = []
    with silenced():
        for step in range(STEPS):
            alone = step == STEP and rank == odd
            if alone and kind == "calls":
                f8sub.precompute_scales(model)
            elif alone and kind == "writes":
                with torch.no_grad():
                    model.layers[0].weight.to_local().mul_(1.001)
            loss = (model(gaussian((16, 32), generator(step))) - 1).square().mean()
            losses.append(take_step(optimizer, loss))
            if not (alone and kind == "forgets"):
                f8sub.precompute_scales(model)
    return losses


@pytest.mark.parametrize(("recipe", "odd", "kind"), long_but(CASES, CASES + MORE))
def test_in_the_middle_of_a_run(ranks, recipe, odd, kind):
    found = ranks(3, run, recipe, kind, odd, timeout=90.0)
    usual = ranks(3, run, recipe, "nothing", odd)[0]
    for losses in found:
        assert losses == found[0]
        if kind == "writes":  # a thousandth, once: other weights from there on, and all is finite
            assert losses[:STEP] == usual[:STEP]
            assert losses == pytest.approx(usual, rel=0.05)
        else:
            assert losses == usual
