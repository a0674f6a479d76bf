"""Batches, modes and weights that one meets under FSDP2 and not alone."""

import torch

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import Stack, equal, seed_weights, shard
from tests.wires import ONE_RECIPE_A_WIRE, on_each

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


def inference(rank: int, world: int, recipe: str) -> list[torch.Tensor]:
    """y in inference_mode, with gradients, and after a step in inference_mode again.

    Not in the very first forward: FSDP2 itself then makes its buffers of inference tensors, and trains no more.
    """
    torch.manual_seed(0)
    model = model_of(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = gaussian((8, 32), generator(0))
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        f8sub.precompute_scales(model)
        first = model(x).clone()
    y = model(x)
    y.square().mean().backward()
    optimizer.step()
    f8sub.precompute_scales(model)
    with torch.inference_mode():
        stepped = model(x).clone()
    with torch.no_grad():
        return [first, y.detach(), stepped, model(x)]


@on_each_recipe
def test_inference_mode_between_and_after_training_steps(ranks, recipe):
    for first, y, stepped, expected in ranks(2, inference, recipe):
        assert torch.equal(first, y)
        assert torch.equal(stepped, expected)
        assert not torch.equal(first, stepped)
