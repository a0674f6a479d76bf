"""conversion_report of a sharded model: one rank alone may count, before any forward or between steps."""

import pytest
import torch

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import BF16, Transformer, float8_layers, seed_weights, shard
from tests.wire import Wire

N, H, T = 64, 96, 8


def x_of(step: int) -> torch.Tensor:
    return gaussian((2, T, N), generator(step))


def trained(rank: int, recipe: str, policy, counting: bool) -> tuple[list[torch.Tensor], list[float]]:
    """Losses of three steps, and the shares that rank 0 counts between them."""
    model = f8sub.convert_to_float8(seed_weights(Transformer(N, H)), recipe)
    shares = [f8sub.conversion_report(model, batch=x_of(0)).flops_share]
    model = shard(model, policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    f8sub.precompute_scales(model)
    losses = []
    for step in range(3):
        if counting and rank == 0:
            with Wire() as wire:
                report = f8sub.conversion_report(model, batch=x_of(step))
            assert wire.gathered == 0
            assert report.counted.endswith(", on meta")
            shares.append(report.flops_share)
        loss = model(x_of(step)).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        f8sub.precompute_scales(model)
    assert all(layer.weight.device_mesh.size() > 1 for layer in float8_layers(model))
    return losses, shares


@pytest.mark.parametrize(("world", "policy"), [(2, BF16)], ids=["2-bf16"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_one_rank_counts_and_training_is_the_same(rank, world, recipe, policy):
    plain, (share,) = trained(rank, recipe, policy, counting=False)
    losses, shares = trained(rank, recipe, policy, counting=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, losses, strict=True))
    assert shares == [share] * len(shares)
    assert len(shares) == (4 if rank == 0 else 1)
    layers = 2 * (4 * N * N + 3 * N * H)
    assert share == pytest.approx(layers / (layers + 11 * N))
