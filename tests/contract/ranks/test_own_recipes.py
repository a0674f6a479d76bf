"""Recipes that f8sub does not ship under FSDP2: other tiles, and GEMMs in high precision."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import f8sub
from tests import oracle
from tests.contract.test_linear_numerics import COMBINATIONS, RECIPES, recipe_with
from tests.data_sets import gaussian, generator, lognormal, spread_columns
from tests.models import BF16, Stack, Transformer, float8_layers, seed_weights, shard, train
from tests.selection import long_but
from tests.specs import spec_of

ROWS = [272, 80, 16]
DEPTH = 96


def full_weight(rows: int) -> torch.Tensor:
    """Rows and columns of very different sizes, the largest element in the last row."""
    weight = spread_columns(lognormal((rows, DEPTH), generator(rows)), 3.0)
    weight[-1, 0] = 2 * weight.abs().max()
    return weight


def model_of(name: str, rows: int) -> nn.Module:
    model = Stack(DEPTH, rows)
    with torch.no_grad():
        model.layers[0].weight.copy_(full_weight(rows))
    return f8sub.convert_to_float8(model, recipe=RECIPES[name])


def step_of(model: nn.Module, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = gaussian((24, DEPTH), generator(1)).requires_grad_()
    y = model(x)
    y.backward(gaussian((24, rows), generator(2)).to(y.dtype))
    return y.detach(), x.grad


def same_codes(gathered: torch.Tensor, weight: torch.Tensor, name: str) -> bool:
    expected = f8sub.quantize(weight, RECIPES[name], operand="w").rowwise
    independent = oracle.quantize(oracle.to_numpy(weight), spec_of(expected.format))
    found = gathered.rowwise
    codes = found.data.view(torch.uint8)
    return (
        torch.equal(codes, expected.data.view(torch.uint8))
        and torch.equal(codes, independent.codes_as())
        and torch.equal(found.scale_inv, expected.scale_inv)
        and found.scale_inv.shape == expected.scale_inv.shape
    )


def sharded(rank: int, world: int, name: str, dim: int) -> list[str]:
    """What differs from the unsharded model: codes, y, dx, before and after a step."""
    found = []
    for rows in ROWS:
        for policy in (None, BF16):
            dtype = torch.float32 if policy is None else torch.bfloat16
            alone, model = model_of(name, rows), model_of(name, rows)
            options = {} if policy is None else {"mp_policy": policy}
            if dim:
                options["shard_placement_fn"] = lambda parameter: Shard(1)
            fully_shard(model, **options)
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
            for step in range(2):
                f8sub.precompute_scales(model)
                where = f"rows {rows}, {dtype}, step {step}: "
                model.unshard()
                weight = alone.layers[0].weight.detach().to(dtype) + torch.zeros((), dtype=dtype)
                if not same_codes(model.layers[0].weight, weight, name):
                    found.append(where + "codes")
                model.reshard()
                with torch.autocast("cpu", torch.bfloat16, enabled=policy is not None):
                    y, dx = step_of(alone, rows)
                other_y, other_dx = step_of(model, rows)
                found += [] if torch.equal(other_y.to(y.dtype), y) else [where + "y"]
                found += [] if torch.equal(other_dx.to(dx.dtype), dx) else [where + "dx"]
                for parameter in alone.parameters():
                    # Every rank has the same gradient: their average is that gradient, up to its rounding.
                    parameter.grad.copy_(next(model.parameters()).grad.full_tensor())
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    return found


QUICK = ("blockwise-float", "mx", "odd-tiles")


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 3], ids="world{}".format)
@pytest.mark.parametrize("name", long_but(QUICK, oracle.VARIANTS))
def test_gathered_in_float8_it_is_the_unsharded_model_bitwise(ranks, name, world):
    assert ranks(world, sharded, name, 0) == [[]] * world


@pytest.mark.parametrize("name", QUICK)
def test_sharded_by_columns(ranks, name):
    assert ranks(2, sharded, name, 1) == [[]] * 2


def losses(rank: int, world: int, recipe: str, gemms: tuple[str, ...]) -> list[tuple[list[float], bool]]:
    """Three steps with and without the float8 all-gather; whether any weight was gathered in float8."""
    results = []
    for all_gather in (True, False):
        model = f8sub.convert_to_float8(
            seed_weights(Transformer(blocks=1), 2.0),
            recipe=recipe_with(recipe, gemms),
            float8_all_gather=all_gather,
        )
        gathers = any(layer.float8_all_gather for layer in float8_layers(model))
        results.append((train(shard(model, BF16), rank), gathers))
    return results


HIGH = [("tensorwise", ("fprop",)), ("mxfp8", ("dgrad",)), ("rowwise", ("wgrad",))]
OTHERS = [
    *(("tensorwise", gemms) for gemms in COMBINATIONS),
    *((recipe, gemms) for recipe in oracle.RECIPES for gemms in COMBINATIONS[:3]),
]


@pytest.mark.parametrize(("recipe", "gemms"), long_but(HIGH, dict.fromkeys([*HIGH, *OTHERS])))
def test_under_fsdp_a_weight_read_in_high_precision_is_gathered_so(ranks, recipe, gemms):
    """wgrad does not read the weight: with it alone in high precision the all-gather stays float8."""
    for (on, gathers), (off, never) in ranks(2, losses, recipe, gemms):
        assert on == off
        assert len(set(on)) == len(on)
        assert (gathers, never) == (None not in recipe_with(recipe, gemms).formats("w"), False)
