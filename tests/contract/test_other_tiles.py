"""Recipes that f8sub does not ship, made on the spot: the tile idea carries them all, sharded or not."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import f8sub
from f8sub import ALL, Float8Format, GemmSpec, Recipe, ScaleRule, Tile
from f8sub.formats import E2M1
from tests import oracle
from tests.budgets import excess
from tests.data_sets import DATA_SETS, gaussian, generator, lognormal, make, spread_columns
from tests.models import BF16, Stack
from tests.selection import long_but
from tests.specs import spec_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
POW2 = ScaleRule.POWER_OF_2
HIGH_PRECISION = GemmSpec(a=None, b=None)


def recipe_of(name: str, x: Float8Format, w: Float8Format, dy: Float8Format) -> Recipe:
    return Recipe(name=name, fprop=GemmSpec(a=x, b=w), dgrad=GemmSpec(a=dy, b=w), wgrad=GemmSpec(a=dy, b=x))


BY_128 = Float8Format(E4M3, Tile(1, 128))
BLOCK = Float8Format(E4M3, Tile(128, 128))
GRID, GRID_DY = Float8Format(E4M3, Tile(256, 256)), Float8Format(E5M2, Tile(256, 256))
MX = Float8Format(E4M3, Tile(1, 32), POW2)
ROW = Float8Format(E4M3, Tile(1, ALL))
TENSOR = Float8Format(E4M3, Tile(ALL, ALL))
FOUR_BITS = Float8Format(E2M1, Tile(ALL, ALL))
TWO_LEVEL = Float8Format(E4M3, Tile(ALL, ALL), ScaleRule.TWO_LEVEL)
RECIPES = {
    recipe.name: recipe
    for recipe in (
        recipe_of("blocks", BY_128, BLOCK, BY_128),
        recipe_of("grid", GRID, GRID, GRID_DY),
        recipe_of("mx", MX, MX, MX),
        recipe_of("odd-tiles", Float8Format(E4M3, Tile(3, 7)), Float8Format(E4M3, Tile(5, 5)), ROW),
        recipe_of("rows-by-tensor", ROW, TENSOR, ROW),
        recipe_of("four-bits-by-tensor", FOUR_BITS, FOUR_BITS, Float8Format(E2M1, Tile(1, ALL))),
        recipe_of("two-levels-by-tensor", TWO_LEVEL, TWO_LEVEL, TWO_LEVEL),
        Recipe(
            name="strips",
            fprop=GemmSpec(a=BY_128, b=BY_128),
            dgrad=GemmSpec(a=BY_128, b=Float8Format(E4M3, Tile(128, 1))),
            wgrad=GemmSpec(a=BY_128, b=BY_128),
        ),
        Recipe(
            name="blocks-then-mx",
            fprop=GemmSpec(a=MX, b=Float8Format(E4M3, Tile(32, 32), POW2)),
            dgrad=GemmSpec(a=MX, b=MX),
            wgrad=GemmSpec(a=GRID_DY, b=MX),
        ),
        Recipe(
            name="wgrad-high",
            fprop=GemmSpec(a=MX, b=MX),
            dgrad=GemmSpec(a=MX, b=MX),
            wgrad=HIGH_PRECISION,
        ),
        Recipe(
            name="dgrad-high",
            fprop=GemmSpec(a=BY_128, b=BLOCK),
            dgrad=HIGH_PRECISION,
            wgrad=GemmSpec(a=BY_128, b=BY_128),
        ),
        Recipe(name="fprop-only", fprop=GemmSpec(a=ROW, b=ROW), dgrad=HIGH_PRECISION, wgrad=HIGH_PRECISION),
        Recipe(
            name="fprop-high",
            fprop=HIGH_PRECISION,
            dgrad=GemmSpec(a=GRID_DY, b=BLOCK),
            wgrad=GemmSpec(a=GRID_DY, b=BLOCK),
        ),
    )
}
SHAPES = {"136x272-to-144": (136, 272, 144), "13x48-to-32": (13, 48, 32)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
on_each_recipe = pytest.mark.parametrize("name", RECIPES, ids=list(RECIPES))
on_each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
on_each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))


def values(matrix: np.ndarray, format: Float8Format | None) -> np.ndarray:
    return matrix if format is None else oracle.quantize(matrix, spec_of(format)).values


def columns_of_weight(w: np.ndarray, row: Float8Format | None, col: Float8Format | None) -> np.ndarray:
    """From the rowwise codes where there are any: the same numbers where both share the scales, else re-scaled."""
    if row is None or col is None:
        return values(w.T.copy(), col)
    derived = values(w, row).T.copy()
    return derived if row.tile == col.tile.t() else values(derived, col)


def products(recipe: Recipe, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> dict[str, oracle.Product]:
    x, w, dy = (oracle.to_numpy(tensor) for tensor in (x, w, dy))
    return {
        "y": oracle.Product(values(x, recipe.fprop.a), values(w, recipe.fprop.b)),
        "dx": oracle.Product(values(dy, recipe.dgrad.a), columns_of_weight(w, *recipe.formats("w"))),
        "dw": oracle.Product(values(dy.T.copy(), recipe.wgrad.a), values(x.T.copy(), recipe.wgrad.b)),
    }


def converted(recipe: Recipe, w: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype)
    with torch.no_grad():
        layer.weight.copy_(w)
    return f8sub.convert_to_float8(nn.Sequential(layer), recipe=recipe)[0]


@on_each_dtype
@on_each_shape
@on_each_recipe
def test_the_three_products(name, shape, dtype):
    rows, depth, cols = shape
    recipe = RECIPES[name]
    for data in DATA_SETS if rows < 100 else ("gaussian", "element_outliers"):
        x, w, dy = (
            make(data, size, seed, dtype)
            for seed, size in enumerate(((rows, depth), (cols, depth), (rows, cols)), 1)
        )
        layer, x_leaf = converted(recipe, w), x.clone().requires_grad_()
        y = layer(x_leaf)
        y.backward(dy)
        expected = products(recipe, x, w, dy)
        worst = {
            product: excess(found, expected[product])
            for product, found in (("y", y), ("dx", x_leaf.grad), ("dw", layer.weight.grad))
        }
        assert all(ratio <= 1 for ratio in worst.values()), f"{data}: {worst}"


def test_the_budget_tells_these_recipes_apart():
    """The test above can fail: one recipe's oracle does not pass for another's."""
    x, w, dy = (
        gaussian(size, generator(seed)) for seed, size in enumerate(((136, 272), (144, 272), (136, 144)))
    )
    y = converted(RECIPES["blocks"], w)(x)
    assert excess(y, products(RECIPES["blocks"], x, w, dy)["y"]) <= 1
    assert excess(y, products(RECIPES["grid"], x, w, dy)["y"]) > 1
    assert excess(y, products(RECIPES["mx"], x, w, dy)["y"]) > 1


@on_each_recipe
def test_what_is_saved_for_backward(name):
    """float8 x by columns where wgrad is float8; x as it is where it stays in high precision."""
    recipe, saved = RECIPES[name], {}
    layer = converted(recipe, gaussian((272, 288), generator(1)))
    weight = layer.weight.untyped_storage()._cdata

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    x = gaussian((160, 288), generator(2)).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    del saved[weight]
    sizes = [tensor.untyped_storage().nbytes() for tensor in saved.values()]
    if (format := recipe.wgrad.b) is None:
        assert sizes == [4 * 160 * 288]
    else:
        codes, scales, *more = sizes
        assert codes == 160 * 288 // format.codes_per_byte
        assert scales == math.prod(format.tile.scale_shape((288, 160))) * format.scale_rule.stored_as.itemsize
        assert more == ([4] if format.scale_rule.has_global else [])
    assert y.requires_grad


GATHERED = list(RECIPES)
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
    """Or the same weight, where one of its GEMMs reads it in high precision."""
    if None in RECIPES[name].formats("w"):
        return type(gathered.detach()) is torch.Tensor and torch.equal(gathered, weight)
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


QUICK = ("blocks", "mx", "odd-tiles")


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 3], ids="world{}".format)
@pytest.mark.parametrize("name", long_but(QUICK, GATHERED))
def test_gathered_in_float8_it_is_the_unsharded_model_bitwise(ranks, name, world):
    assert ranks(world, sharded, name, 0) == [[]] * world


@pytest.mark.parametrize("name", ["blocks", "mx", "odd-tiles"], ids=str)
def test_sharded_by_columns(ranks, name):
    assert ranks(2, sharded, name, 1) == [[]] * 2


@pytest.mark.parametrize("name", ["fprop-high", "dgrad-high", "blocks"], ids=str)
def test_the_report_says_how_the_weight_is_gathered(name):
    text = str(f8sub.conversion_report(model_of(name, 48)))
    assert ("gathered in high precision" in text) == (name != "blocks")
