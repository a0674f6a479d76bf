"""NaN or infinity in one rank's shard: NaN codes on all ranks at once, then an error that names the layer."""

import pytest
import torch

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import Stack, refusal, seed_weights, shard, silenced
from tests.weights.test_held_weights import error_of
from tests.wire import ONE_RECIPE_A_WIRE, Wire, on_each

BAD = {"nan": float("nan"), "inf": float("inf"), "minus_inf": float("-inf")}
on_each_recipe = on_each(ONE_RECIPE_A_WIRE)


@pytest.mark.parametrize(("value", "world"), [("nan", 2), ("inf", 3), ("minus_inf", 3)])
@on_each_recipe
def test_one_rank_s_bad_element_is_everyone_s(rank, world, recipe, value):
    """Rank 1 alone finds a bad element in layer 1 of 3."""
    model = shard(f8sub.convert_to_float8(seed_weights(Stack(32, 48, 64, 32)), recipe=recipe))
    f8sub.precompute_scales(model)
    x = gaussian((16, 32), generator(rank))
    assert model(x).isfinite().all()
    if rank == 1:
        with torch.no_grad():
            model.layers[1].weight.to_local()[3, 5] = BAD[value]
    with Wire() as wire:
        f8sub.precompute_scales(model)
    assert wire.all_reduces == 1
    for number, layer in enumerate(model.layers):
        layer.unshard()
        assert layer.weight.dequantize().isnan().any() == (number == 1)
        layer.reshard()
    assert model(x).isnan().any()
    error = refusal(f8sub.Float8NumericsError, f8sub.precompute_scales, model)
    assert [f"layers.{number}" in error for number in range(3)] == [False, True, False]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("repaired_on", ["all", "one"])
def test_the_error_is_raised_by_each_call_until_the_weight_is_repaired(rank, world, repaired_on):
    """Of the rank that caught it, too; and the first call after a repair raises nothing, whoever wrote to its shard."""
    model = shard(f8sub.convert_to_float8(seed_weights(Stack(32, 48, 64, 32))))
    holder = world - 1
    local = model.layers[1].weight.to_local()
    before = local.clone()
    assert error_of(model) == ""
    if rank == holder:
        with torch.no_grad():
            local[3, 5] = torch.nan
    messages = [error_of(model) for _ in range(4)]
    assert messages[0] == ""
    assert all("master weight of layers.1 (" in message for message in messages[1:])
    if rank == holder or repaired_on == "all":
        with torch.no_grad():
            local.copy_(before)
    assert [error_of(model) for _ in range(3)] == ["", "", ""]


@on_each_recipe
def test_a_bad_element_shows_on_every_rank_without_precompute_scales_too(rank, world, recipe):
    """But in e2m1, which has no NaN: there it shows when scales are computed next, as above."""
    model = shard(f8sub.convert_to_float8(seed_weights(Stack(32, 48)), recipe=recipe))
    f8sub.precompute_scales(model)
    if rank == 1:
        with torch.no_grad():
            model.layers[0].weight.to_local()[0, 0] = float("nan")
    with silenced():
        y = model(gaussian((16, 32), generator(0)))
    assert y.isnan().any() == (recipe != "nvfp4")
