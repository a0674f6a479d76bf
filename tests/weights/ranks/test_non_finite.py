"""NaN or infinity in one rank's shard: NaN codes on all ranks at once, then an error that names the layer."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import f8sub
from f8sub.features.non_finite import held_weights
from tests.data_sets import gaussian, generator
from tests.layers import dy_of
from tests.models import Stack, seed_weights, shard
from tests.wire import Wire
from tests.wires import ONE_RECIPE_A_WIRE, on_each

RECIPES = ONE_RECIPE_A_WIRE
BAD = {"nan": float("nan"), "inf": float("inf"), "minus_inf": float("-inf")}
on_each_recipe = on_each(RECIPES)
on_each_value = pytest.mark.parametrize("value", BAD, ids=list(BAD))


def spoiled(rank: int, world: int, recipe: str, value: str) -> tuple[bool, list[bool], int, str]:
    """Rank 1 alone finds a bad element in layer 1 of 3."""
    model = shard(f8sub.convert_to_float8(seed_weights(Stack(32, 48, 64, 32)), recipe=recipe))
    f8sub.precompute_scales(model)
    x = gaussian((16, 32), generator(rank))
    clean = model(x).isfinite().all().item()
    if rank == 1:
        with torch.no_grad():
            model.layers[1].weight.to_local()[3, 5] = BAD[value]
    with Wire() as wire:
        f8sub.precompute_scales(model)
    poisoned = []
    for layer in model.layers:
        layer.unshard()
        poisoned.append(layer.weight.dequantize().isnan().any().item())
        layer.reshard()
    assert model(x).isnan().any()
    try:
        f8sub.precompute_scales(model)
    except f8sub.Float8NumericsError as error:
        return clean, poisoned, wire.all_reduces, str(error)
    return clean, poisoned, wire.all_reduces, "no error"


@pytest.mark.parametrize("world", [2, 3], ids=["world2", "world3"])
@on_each_value
@on_each_recipe
def test_one_rank_s_bad_element_is_everyone_s(ranks, recipe, value, world):
    for clean, poisoned, all_reduces, message in ranks(world, spoiled, recipe, value):
        assert clean
        assert poisoned == [False, True, False]
        assert all_reduces == 1
        assert "layers.1" in message
        assert "layers.0" not in message
        assert "layers.2" not in message


def spoiled_without_precompute(rank: int, world: int, recipe: str) -> bool:
    model = shard(f8sub.convert_to_float8(seed_weights(Stack(32, 48)), recipe=recipe))
    f8sub.precompute_scales(model)
    if rank == 1:
        with torch.no_grad():
            model.layers[0].weight.to_local()[0, 0] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", f8sub.Float8Warning)
        return model(gaussian((16, 32), generator(0))).isnan().any().item()


@on_each_recipe
def test_a_bad_element_shows_on_every_rank_without_precompute_scales_too(ranks, recipe):
    """But in e2m1, which has no NaN: there it shows when scales are computed next, as above."""
    shows = recipe != "nvfp4"
    assert ranks(2, spoiled_without_precompute, recipe) == [shows, shows]


def error_of(model: nn.Module) -> str:
    """What the next ``precompute_scales`` raises."""
    try:
        f8sub.precompute_scales(model)
    except f8sub.Float8NumericsError as error:
        return str(error)
    return ""


def spoil(weight: torch.Tensor, value: float) -> None:
    with torch.no_grad():
        weight[3, 5] = value


@on_each_value
@pytest.mark.parametrize(
    ("recipe", "primary"), [*((name, False) for name in f8sub.recipe_names()), ("rowwise", True)]
)
def test_a_bad_element_of_a_weight_that_is_not_sharded(recipe, value, primary):
    """It is told by every second call, until it is repaired: as of a sharded one."""
    model = seed_weights(Stack(32, 48, 64, 32))
    f8sub.convert_to_float8(model, recipe=recipe, primary_weights=primary)
    if primary:
        f8sub.optim.MasterWeights(torch.optim.SGD(model.parameters(), lr=1.0))
    x = gaussian((16, 32), generator(1))
    y = model(x)
    assert [error_of(model) for _ in range(3)] == ["", "", ""]
    weight = model.layers[1].weight
    before = weight.detach().clone()
    spoil(weight, BAD[value])
    messages = [error_of(model) for _ in range(4)]
    assert messages[0] == messages[2] == ""
    for message in messages[1], messages[3]:
        assert "master weight of layers.1 (" in message
    assert model(x).isnan().any()
    with torch.no_grad():
        weight.copy_(before)
    assert [error_of(model) for _ in range(3)] == ["", "", ""]
    assert torch.equal(model(x), y)


def test_a_weight_that_does_not_change_is_looked_at_once(monkeypatch):
    looked = []
    amaxes = held_weights.weight_amaxes
    monkeypatch.setattr(
        held_weights, "weight_amaxes", lambda weights: looked.append(len(weights)) or amaxes(weights)
    )
    model = f8sub.convert_to_float8(seed_weights(Stack(32, 48, 64, 32)))
    for _ in range(3):
        f8sub.precompute_scales(model)
    with torch.no_grad():
        model.layers[2].weight.mul_(2.0)
    f8sub.precompute_scales(model)
    assert looked == [3, 1]


def test_nothing_is_told_nor_looked_at_while_a_graph_is_captured(monkeypatch):
    """What was found before is told by the first call after that."""
    model = f8sub.convert_to_float8(seed_weights(Stack(32, 48, 64, 32)))
    spoil(model.layers[1].weight, torch.nan)
    assert error_of(model) == ""
    with monkeypatch.context() as captured:
        captured.setattr(held_weights, "is_capturing", lambda tensor: True)
        captured.setattr(held_weights.HostCopy, "read", lambda copy: pytest.fail("the host waits"))
        captured.setattr(held_weights, "weight_amaxes", lambda weights: pytest.fail("weights are looked at"))
        assert [error_of(model) for _ in range(2)] == ["", ""]
    assert "layers.1 (" in error_of(model)


def spoiled_in_ddp(rank: int, world: int, recipe: str) -> list[str]:
    model = f8sub.convert_to_float8(seed_weights(Stack(32, 48, 64, 32)), recipe=recipe)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    y = ddp(gaussian((16, 32), generator(rank)))
    y.backward(dy_of(y))
    if rank == 1:
        model.layers[1].weight.grad[2, 2] = torch.inf
    dist.all_reduce(model.layers[1].weight.grad)
    optimizer.step()
    return [error_of(ddp), error_of(ddp)]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_a_bad_element_of_replicas_is_told_on_every_rank(ranks, recipe):
    """With delayed scaling by the histories, which looked at the weights when the optimizer stepped."""
    for messages in ranks(2, spoiled_in_ddp, recipe):
        (told,) = (message for message in messages if message)
        assert "layers.1 (" in told
        assert "layers.2" not in told


def spoiled_where_gathered_in_high_precision(rank: int, world: int) -> list[str]:
    model = f8sub.convert_to_float8(seed_weights(Stack(32, 48)), float8_all_gather=False)
    shard(model)
    if rank == 1:
        spoil(model.layers[0].weight.to_local(), torch.nan)
    return [error_of(model), error_of(model)]


def test_a_bad_element_of_a_shard_that_no_table_covers_is_told_by_the_rank_that_holds_it(ranks):
    first, (before, told) = ranks(2, spoiled_where_gathered_in_high_precision)
    assert first == ["", ""]
    assert before == ""
    assert "master weight of layers.0 (on this rank)" in told


@on_each_value
@on_each_recipe
def test_a_bad_activation_does_not_flush_the_rest(recipe, value):
    """The other elements keep their codes: a row of y without the bad element is what it is without it."""
    layer = f8sub.convert_to_float8(nn.Sequential(seed_weights(nn.Linear(32, 48))), recipe=recipe)
    x = gaussian((16, 32), generator(4))
    x[5, 7] = 0.0
    expected = layer(x)
    x[5, 7] = BAD[value]
    y = layer(x)
    others = torch.arange(16) != 5
    assert torch.equal(y[others], expected[others])
    assert (y[others] != 0).all()
    assert y[5].isnan().all()


@on_each_recipe
def test_a_bad_cotangent_shows_in_its_row_of_dx_and_spares_the_others(recipe):
    layer = f8sub.convert_to_float8(nn.Sequential(seed_weights(nn.Linear(32, 48))), recipe=recipe)
    x = gaussian((16, 32), generator(4)).requires_grad_()
    dy = gaussian((16, 48), generator(5))
    dy[2, 3] = float("inf")
    layer(x).backward(dy)
    bad = torch.arange(16) == 2
    assert x.grad[bad].isnan().all()
    assert x.grad[~bad].isfinite().all()
    assert (x.grad[~bad] != 0).any(dim=1).all()
