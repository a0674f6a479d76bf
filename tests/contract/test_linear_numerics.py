"""y, dx, dw, the bias gradient, and all codes and scales of a converted layer, against the float64 oracle."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import f8sub
from f8sub import Float8Format, GemmSpec, Recipe, ScaleRule, Tile
from f8sub.kernels import reference
from tests import oracle
from tests.budgets import excess
from tests.data_sets import DATA_SETS, DTYPES, edge_values, gaussian, generator, make, spread_columns
from tests.selection import long_but
from tests.specs import recipe_of, spec_of

E4M3, POW2 = torch.float8_e4m3fn, ScaleRule.POWER_OF_2
RECIPES = {
    **{name: recipe_of(name) for name in oracle.VARIANTS},
    **{name: f8sub.get_recipe(name) for name in f8sub.recipe_names()},
    "blockwise-float": f8sub.get_recipe("blockwise", power_of_2_scales=False),
    "gridquant-32-e4m3": f8sub.get_recipe("gridquant", block=32, dy=torch.float8_e4m3fn),
}
SHAPES = {
    "64x48-to-32": ((64, 48), 32),
    "13x64-to-48": ((13, 64), 48),
    "1x32-to-16": ((1, 32), 16),
    "2x5x32-to-64": ((2, 5, 32), 64),
    "40x512-to-16": ((40, 512), 16),
    "7x192-to-144": ((7, 192), 144),
    "145x528-to-272": ((145, 528), 272),
}
GEMMS = ("fprop", "dgrad", "wgrad")
COMBINATIONS = [names for count in (1, 2, 3) for names in itertools.combinations(GEMMS, count)]
on_each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=list(RECIPES))
on_each_data_set = pytest.mark.parametrize("data", DATA_SETS, ids=list(DATA_SETS))
on_each_operand = pytest.mark.parametrize("operand", ["x", "w", "dy"], ids=["x", "w", "dy"])


def test_the_oracle_knows_every_recipe():
    assert sorted(oracle.RECIPES) == f8sub.recipe_names()
    assert {*oracle.RECIPES, *oracle.VARIANTS} == set(RECIPES)


def converted(
    recipe: f8sub.Recipe | str, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> nn.Linear:
    of_weight = {"dtype": weight.dtype, "device": weight.device}
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, **of_weight)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    model = f8sub.convert_to_float8(nn.Sequential(layer), recipe=recipe)
    assert isinstance(model[0], f8sub.Float8Linear)
    return model[0]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def step(layer: nn.Linear, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    results = {"y": flat(y), "dx": flat(x.grad), "dw": layer.weight.grad}
    if layer.bias is not None:
        results["db"] = layer.bias.grad[None]
    return results


def assert_within_budget(results: dict[str, torch.Tensor], products: dict[str, oracle.Product]) -> None:
    worst = {name: excess(result, products[name]) for name, result in results.items()}
    assert all(ratio <= 1 for ratio in worst.values()), f"errors in units of their budgets: {worst}"


@pytest.mark.parametrize(
    ("dtype", "shape"),
    long_but(
        [("fp32", "13x64-to-48"), ("bf16", "2x5x32-to-64")], itertools.product(["fp32", "bf16"], SHAPES)
    ),
)
@on_each_data_set
@on_each_recipe
def test_the_three_products_and_the_bias_gradient(recipe, data, dtype, shape):
    dtype = DTYPES[dtype]
    x_shape, rows = SHAPES[shape]
    x = make(data, x_shape, 1, dtype)
    w = make(data, (rows, x_shape[-1]), 2, dtype)
    dy = make(data, (*x_shape[:-1], rows), 3, dtype)
    bias = make(data, (1, rows), 4, dtype)[0]
    results = step(converted(RECIPES[recipe], w, bias), x, dy)
    assert {tensor.dtype for tensor in results.values()} == {dtype}
    assert_within_budget(results, oracle.linear(recipe, flat(x), w, flat(dy), bias))


@on_each_recipe
def test_fp16(recipe):
    x, w, dy = (make("gaussian", shape, 5, torch.float16) for shape in ((24, 64), (32, 64), (24, 32)))
    assert_within_budget(step(converted(RECIPES[recipe], w), x, dy), oracle.linear(recipe, x, w, dy))


@pytest.mark.parametrize("gemms", COMBINATIONS, ids="-".join)
@on_each_recipe
def test_any_gemms_in_high_precision(recipe, gemms):
    made = RECIPES[recipe].with_high_precision(**dict.fromkeys(gemms, True))
    for seed, data in enumerate(("gaussian", "row_outliers", "lognormal")):
        shapes = ((24, 64), (32, 64), (24, 32))
        x, w, dy = (make(data, shape, 10 * seed + i) for i, shape in enumerate(shapes))
        results = step(converted(made, w), x, dy)
        assert_within_budget(results, oracle.linear(recipe, x, w, dy, high_precision=gemms))


@on_each_recipe
def test_autocast_casts_first_and_returns_each_gradient_in_its_own_dtype(recipe):
    x, w, dy = make("gaussian", (24, 64), 1), make("gaussian", (32, 64), 2), make("gaussian", (24, 32), 3)
    bias = make("gaussian", (1, 32), 4)[0]
    layer, x_leaf = converted(RECIPES[recipe], w, bias), x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x_leaf)
    y.backward(dy.bfloat16())
    assert y.dtype == torch.bfloat16
    assert {x_leaf.grad.dtype, layer.weight.grad.dtype, layer.bias.grad.dtype} == {torch.float32}
    products = oracle.linear(recipe, *(t.bfloat16() for t in (x, w, dy, bias)))
    results = {"y": y, "dx": x_leaf.grad.bfloat16(), "dw": layer.weight.grad.bfloat16()}
    assert_within_budget(results, products)


@on_each_recipe
def test_dgrad_reads_columns_derived_from_the_rowwise_codes(recipe):
    """Columns over e^8: codes derived and codes cast directly differ, and the budget tells them apart."""
    x, dy = make("gaussian", (32, 64), 1), make("gaussian", (32, 48), 3)
    w = spread_columns(make("gaussian", (48, 64), 2), 8.0)
    dx = step(converted(RECIPES[recipe], w), x, dy)["dx"]
    right = oracle.linear(recipe, x, w, dy)["dx"]
    spec = oracle.spec_of(recipe, "w")
    direct = oracle.quantize(oracle.to_numpy(w).T.copy(), spec)
    assert excess(dx, right) <= 1
    assert (excess(dx, oracle.Product(right.a, direct.values)) > 1) == (not spec.square)


def packable(recipe: str, operand: str, shape: tuple[int, int]) -> tuple[int, int]:
    """The shape with rows added until codes that share a byte are whole in the columnwise operand too."""
    return shape[0] + -shape[0] % oracle.spec_of(recipe, operand).codes_per_byte, shape[1]


def assert_bitwise(found: f8sub.Float8Tensor, recipe: str, operand: str, matrix: torch.Tensor) -> None:
    expected = oracle.operands(recipe, operand, matrix)
    for usage, right in zip((found.rowwise, found.columnwise), expected, strict=True):
        assert (usage is None) == (right is None)
        if right is not None:
            assert right.differences(usage) == []
            assert usage.data.is_contiguous()


@pytest.mark.parametrize("dtype", long_but(["bf16"], DTYPES))
@on_each_operand
@pytest.mark.parametrize("data", [*DATA_SETS, "edge_values"])
@on_each_recipe
def test_codes_and_scales_are_the_oracles(recipe, data, operand, dtype):
    if data == "edge_values":
        matrices = edge_values(DTYPES[dtype]).values()
    else:
        shapes = (32, 48), (13, 64), (1, 16), (257, 16), (144, 272)
        matrices = [make(data, packable(recipe, operand, shape), 11, DTYPES[dtype]) for shape in shapes]
    for matrix in matrices:
        if not matrix.isfinite().all():
            matrix = matrix.nan_to_num(posinf=1e4, neginf=-1e4)
        assert_bitwise(f8sub.quantize(matrix, RECIPES[recipe], operand=operand), recipe, operand, matrix)


@on_each_operand
@on_each_recipe
@settings(max_examples=40, deadline=None, derandomize=True)
@given(bits=st.binary(min_size=4 * 16 * 4, max_size=4 * 16 * 4))
def test_any_float32_bits(recipe, operand, bits):
    """NaN, infinity, subnormals and any mixture of magnitudes."""
    matrix = torch.frombuffer(bytearray(bits), dtype=torch.float32).view(4, 16)
    assert_bitwise(f8sub.quantize(matrix, RECIPES[recipe], operand=operand), recipe, operand, matrix)


def both_ways(quantized: f8sub.Float8Tensor, matrix: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What each usage that is there stands for, and the matrix as that one sees it."""
    found = []
    if quantized.rowwise is not None:
        found.append((reference.dequantize(quantized.rowwise, quantized.dtype), matrix))
    if quantized.columnwise is not None:
        found.append((reference.dequantize(quantized.columnwise, quantized.dtype), matrix.t()))
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=list(DTYPES))
@on_each_operand
@on_each_recipe
def test_the_largest_number_stands_for_a_finite_one_nearby(recipe, operand, dtype):
    """Where the nearest code stands for more than float32 holds, for the largest float32."""
    matrix = edge_values(DTYPES[dtype])["largest_among_gaussian"].float()
    for back, exact in both_ways(f8sub.quantize(matrix, RECIPES[recipe], operand=operand), matrix):
        assert back.isfinite().all()
        largest = exact.abs().max()
        ratio = back[exact.abs() == largest].abs().double() / largest.double()
        # Half a step of the coarsest format, e2m1, whose scales are rounded, too; e5m2's is half of that.
        coarse = oracle.spec_of(recipe, operand).format == "e2m1"
        assert ratio.min() >= 1 - (0.25 if coarse else 0.125)
        assert ratio.max() <= 1 + 2**-3


@on_each_operand
@on_each_recipe
def test_non_finite_elements_stay_where_they_are(recipe, operand):
    """NaN codes in place; where there are none, as in e2m1, NaN for the tile and nothing else."""
    matrix = gaussian((32, 48), generator(2))
    matrix[3, 4], matrix[7, 9], matrix[20, 0] = float("nan"), float("inf"), float("-inf")
    quantized = f8sub.quantize(matrix, RECIPES[recipe], operand=operand)
    assert_bitwise(quantized, recipe, operand, matrix)
    spec = oracle.spec_of(recipe, operand)
    lost = (spec.tile[0] or 32) * (spec.tile[1] or 48) if spec.format == "e2m1" else 1
    for back, exact in both_ways(quantized, matrix):
        assert back[~exact.isfinite()].isnan().all()
        assert back.isnan().sum() <= 3 * lost


@pytest.mark.parametrize("kept", ["rowwise", "columnwise"], ids=["rowwise", "columnwise"])
@on_each_operand
@on_each_recipe
def test_one_usage_alone_is_the_same_usage(recipe, operand, kept):
    matrix = make("gaussian", (32, 48), 9)
    expected = oracle.operands(recipe, operand, matrix)[kept == "columnwise"]
    usages = {"rowwise": kept == "rowwise", "columnwise": kept == "columnwise"}
    if expected is not None:
        one = f8sub.quantize(matrix, RECIPES[recipe], operand, **usages)
        assert [name for name in usages if getattr(one, name) is not None] == [kept]
        assert expected.differences(getattr(one, kept)) == []


BY_128, STRIPS = Float8Format(E4M3, Tile(1, 128)), Float8Format(E4M3, Tile(128, 1))
MX, BLOCK = Float8Format(E4M3, Tile(1, 32), POW2), Float8Format(E4M3, Tile(32, 32), POW2)
GRID = Float8Format(torch.float8_e5m2, Tile(256, 256))
OF_VECTORS = GemmSpec(a=BY_128, b=BY_128)
OF_EACH_GEMM = [
    Recipe(name="strips", fprop=OF_VECTORS, dgrad=GemmSpec(a=BY_128, b=STRIPS), wgrad=OF_VECTORS),
    Recipe(
        name="blocks-then-mx",
        fprop=GemmSpec(a=MX, b=BLOCK),
        dgrad=GemmSpec(a=MX, b=MX),
        wgrad=GemmSpec(a=GRID, b=MX),
    ),
]


def values(matrix: np.ndarray, format: Float8Format | None) -> np.ndarray:
    return matrix if format is None else oracle.quantize(matrix, spec_of(format)).values


def columns_of_weight(w: np.ndarray, row: Float8Format | None, col: Float8Format | None) -> np.ndarray:
    """From the rowwise codes where there are any: the same numbers where both share the scales, else re-scaled."""
    if row is None or col is None:
        return values(w.T.copy(), col)
    derived = values(w, row).T.copy()
    return derived if row.tile == col.tile.t() else values(derived, col)


def products_of(recipe: Recipe, *of_layer: torch.Tensor) -> dict[str, oracle.Product]:
    x, w, dy = map(oracle.to_numpy, of_layer)
    return {
        "y": oracle.Product(values(x, recipe.fprop.a), values(w, recipe.fprop.b)),
        "dx": oracle.Product(values(dy, recipe.dgrad.a), columns_of_weight(w, *recipe.formats("w"))),
        "dw": oracle.Product(values(dy.T.copy(), recipe.wgrad.a), values(x.T.copy(), recipe.wgrad.b)),
    }


@pytest.mark.parametrize("rows", [13, 136])
@pytest.mark.parametrize("recipe", OF_EACH_GEMM, ids=[recipe.name for recipe in OF_EACH_GEMM])
def test_formats_of_each_gemm_s_own(recipe, rows):
    for data in ("gaussian", "element_outliers"):
        x, w, dy = make(data, (rows, 272), 1), make(data, (144, 272), 2), make(data, (rows, 144), 3)
        assert_within_budget(step(converted(recipe, w), x, dy), products_of(recipe, x, w, dy))
