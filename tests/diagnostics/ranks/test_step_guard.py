"""A step whose gradients are not finite on one rank changes nothing on any."""

import pytest
import torch

import f8sub
from tests.data_sets import gaussian, generator
from tests.diagnostics.test_step_guard import (
    BAD_STEPS,
    STEPS,
    make,
    on_fused_and_foreach,
)
from tests.models import BF16, Stack, heard, seed_weights, shard, update


def trained(rank: int, name: str, recipe: str, bad_steps: tuple[int, ...]) -> list:
    """Losses and skipped steps; rank 1 alone has a bad batch in the bad steps, which the others take out."""
    model = f8sub.convert_to_float8(seed_weights(Stack(32, 48, 32)), recipe=recipe)
    model = shard(model, BF16)
    optimizer = make(name, model.parameters())
    guard = f8sub.skip_step_if_nonfinite(optimizer)
    f8sub.precompute_scales(model)
    losses = []
    with heard() as told:
        for step in range(STEPS):
            if step in BAD_STEPS and not bad_steps:
                continue
            x = gaussian((16, 32), generator(10 * step + rank))
            if step in bad_steps and rank == 1:
                x[3, 4] = torch.nan
            loss = model(x).float().square().mean()
            loss.backward()
            update(model, optimizer)
            if step not in bad_steps:
                losses.append(loss.item())
    return [losses, int(guard.skipped), told]


@pytest.mark.parametrize("name", ["adamw-fused", "adamw-foreach", "sgd-momentum"])
@pytest.mark.parametrize("world", [3])
def test_one_rank_s_bad_batch_skips_the_step_of_all(rank, world, name):
    losses, count, told = trained(rank, name, "tensorwise", BAD_STEPS)
    assert [losses, 0, []] == trained(rank, name, "tensorwise", ())
    assert (count, told) == (len(BAD_STEPS), [])


@on_fused_and_foreach
def test_delayed_histories_are_those_of_the_finite_amaxes_and_training_goes_on(rank, world, name):
    """A bad x or dy is told, and no error."""
    losses, count, told = trained(rank, name, "delayed", BAD_STEPS)
    assert count == len(BAD_STEPS)
    assert torch.tensor(losses).isfinite().all()
    assert told
    assert all("NaN or infinity in" in message and "histories" in message for message in told)


@pytest.mark.parametrize("world", [3])
def test_a_rank_without_gradients_skips_with_the_others(rank, world):
    """A rank whose parameters have no gradient joins the others' decision."""
    model = seed_weights(Stack(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    guard = f8sub.skip_step_if_nonfinite(optimizer)
    if rank == 0:
        model.layers[0].weight.grad = torch.full((16, 16), torch.nan)
    optimizer.step()
    assert int(guard.skipped) == 1
