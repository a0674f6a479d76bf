"""Recipes that f8sub does not ship, made on the spot: the tile idea carries them all, sharded or not."""

import numpy as np
import pytest
import torch
from torch import nn

import f8sub
from f8sub import ALL, Float8Format, GemmSpec, Recipe, ScaleRule, Tile
from f8sub.formats import E2M1
from tests import oracle
from tests.budgets import excess
from tests.data_sets import DATA_SETS, gaussian, generator, make
from tests.specs import spec_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
POW2 = ScaleRule.POWER_OF_2


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
