"""Batches, modes and weights that one meets under FSDP2 and not alone."""

import torch

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import Stack, equal, seed_weights, shard
from tests.wire import ONE_RECIPE_A_WIRE, on_each

RECIPES = (*ONE_RECIPE_A_WIRE, "delayed")
on_each_recipe = on_each(RECIPES)


def model_of(recipe: str, seed: int = 0) -> torch.nn.Module:
    model = f8sub.convert_to_float8(seed_weights(Stack(32, 48, 32), seed=seed), recipe=recipe)
    return shard(model)


def empty_batch(rank: int, world: int, recipe: str, empty: bool) -> list[torch.Tensor]:
    """Rank 1's batch has no rows; or that rank's loss counts for nothing, with rows."""
    model = model_of(recipe)
    f8sub.precompute_scales(model)
    x = gaussian((8, 32), generator(rank)).requires_grad_()
    if rank == 1:
        x = (x[:0] if empty else x).detach().requires_grad_()
    y = model(x)
    assert y.shape == (len(x), 32)
    (y.square().sum() * (rank != 1)).backward()
    assert x.grad.shape == x.shape
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


@on_each_recipe
def test_a_batch_of_no_rows_on_one_rank_alone(ranks, recipe):
    """It takes part in every collective and adds nothing to the gradients, bit for bit."""
    found, expected = (ranks(3, empty_batch, recipe, empty)[0] for empty in (True, False))
    assert all(gradient.isfinite().all() for gradient in found)
    assert equal(found, expected)


@on_each_recipe
def test_inference_mode_between_and_after_training_steps(rank, world, recipe):
    """y in inference_mode and of a training step after it, three times; and after a change without a step.

    Not in the very first forward: FSDP2 itself then makes its buffers of inference tensors, and trains no more.
    """
    torch.manual_seed(0)
    model, found = model_of(recipe), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = gaussian((8, 32), generator(0))
    with torch.no_grad():
        model(x)
    for _ in range(3):
        with torch.inference_mode():
            f8sub.precompute_scales(model)
            evaluated = model(x).clone()
        y = model(x)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((evaluated, y.detach()))
    with torch.inference_mode():
        f8sub.precompute_scales(model)
        model(x)  # its codes are made here, since backward let the last ones go
    with torch.no_grad():
        model.layers[0].weight.mul_(0.5)
        f8sub.precompute_scales(model)
        y = model(x)
    with torch.inference_mode():
        found.append((model(x).clone(), y))
    assert all(torch.equal(evaluated, y) for evaluated, y in found)
    assert not any(torch.equal(found[i][1], found[i + 1][1]) for i in range(3))
