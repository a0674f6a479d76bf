"""Delayed scaling where several optimizers, or one of a part, step the layers of one model."""

import pytest
import torch
from torch import nn

import f8sub
from tests.features.delayed.ranks.test_histories import batch, model_of, on_and_off, states_of
from tests.models import equal, shard

STEPS = 4


def train(model: nn.Module, ranks: range, frozen: bool) -> list[dict[str, torch.Tensor]]:
    """With the batches of ``ranks``; the first layer has an optimizer of its own, or none where it is frozen."""
    first, *others = (layer.weight for layer in model.layers)
    first.requires_grad_(not frozen)
    groups = [others] if frozen else [[first], others]
    optimizers = [torch.optim.SGD(weights, lr=1e-3 / len(ranks)) for weights in groups]
    f8sub.precompute_scales(model)
    for step in range(STEPS):
        for rank in ranks:
            x, dy = batch(step, rank)
            model(x).backward(dy)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        f8sub.precompute_scales(model)
    return states_of(model)


def sharded(rank: int, world: int, frozen: bool, all_gather: bool) -> list[dict[str, torch.Tensor]]:
    return train(shard(model_of(all_gather)), range(rank, rank + 1), frozen)


@on_and_off
@pytest.mark.parametrize("frozen", [False, True], ids=["two-optimizers", "one-layer-frozen"])
def test_each_history_rolls_with_the_steps_of_its_own_weight(ranks, frozen, all_gather):
    expected = train(model_of(), range(2), frozen)
    assert equal(ranks(2, sharded, frozen, all_gather), [expected] * 2)
    w = [(state["history"][:, 1] != 0).sum() for state in expected]
    assert w == [0 if frozen else 2, 2, 2]
    x = batch(STEPS - 1, 0)[0].abs().max(), batch(STEPS - 1, 1)[0].abs().max()
    assert expected[0]["history"][-1, 0] == max(x)
