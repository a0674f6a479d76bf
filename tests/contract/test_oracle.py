"""The oracle against torch's own float8 types and matmul: two independent answers to the same question."""

import numpy as np
import pytest
import torch

from tests import oracle
from tests.budgets import excess, product_budget
from tests.data_sets import DATA_SETS, make

FORMATS = ["e4m3", "e5m2"]
on_each_format = pytest.mark.parametrize("format", FORMATS, ids=FORMATS)
ALL_FORMATS = list(oracle.VALUES)
on_all_formats = pytest.mark.parametrize("format", ALL_FORMATS, ids=ALL_FORMATS)
RECIPES = [*oracle.RECIPES, *oracle.VARIANTS]
on_each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=RECIPES)


@on_each_format
def test_all_256_values(format):
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(oracle.TORCH_DTYPES[format]).to(torch.float64).numpy()
    np.testing.assert_array_equal(oracle.VALUES[format], expected)
    assert torch.finfo(oracle.TORCH_DTYPES[format]).max == oracle.MAX[format]


def test_the_values_of_e2m1():
    """OCP Microscaling Formats (MX) v1.0, table 4."""
    half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert oracle.VALUES["e2m1"].tolist() == [*half, *(-value for value in half)]
    assert oracle.MAX["e2m1"] == 6.0


@on_all_formats
def test_ties_go_to_the_even_code(format):
    values = oracle.VALUES[format]
    assert oracle.nearest_code(np.array([(values[4] + values[5]) / 2]), format) == 4
    assert oracle.nearest_code(np.array([(values[5] + values[6]) / 2]), format) == 6
    assert oracle.nearest_code(np.array([values[1] / 2]), format) == 0


def test_out_of_range_clamps_and_nan_stays():
    values = np.array([1e9, -1e9, np.nan, -0.0])
    assert oracle.nearest_code(values, "e4m3").tolist() == [0x7E, 0xFE, 0x7F, 0x80]
    assert oracle.nearest_code(values, "e5m2").tolist() == [0x7B, 0xFB, 0x7F, 0x80]
    assert oracle.nearest_code(values, "e2m1").tolist() == [7, 15, 0, 8]


def test_scales():
    plain, power = oracle.Spec("e4m3", (None, None)), oracle.Spec("e4m3", (None, None), "power_of_2")
    amax = np.array([0.0, 448.0, 1.0, 3.0, 447.0, 1e-38, 3e38])
    assert oracle.scale_of(amax, plain)[:4].tolist() == [1.0, 1.0, 448.0, np.float32(448.0 / 3.0)]
    assert oracle.scale_of(amax, power)[:5].tolist() == [1.0, 1.0, 256.0, 128.0, 1.0]
    for spec in (plain, power):
        scale = oracle.scale_of(amax, spec)
        assert scale.dtype == np.float32
        assert np.isfinite(scale).all()
        assert np.isfinite(np.float32(1) / scale).all()
        assert (scale > 0).all()


def test_exponent_bytes():
    """The byte is the exponent, plus 127, of the inverse scale; that is amax / 448 rounded up to a power of two."""
    amax = np.array([[448.0, 449.0, 896.0, 1.0, 0.0, 3e38, 1e-45]])
    stored = oracle.quantize(amax, oracle.Spec("e4m3", (1, 1), "e8m0")).stored_scale_inv()
    exponents = [0, 1, 1, -8, 0, 120, -126]
    assert (stored.int() - 127).tolist() == [exponents]
    torch_bytes = torch.tensor([[2.0**e for e in exponents]]).to(torch.float8_e8m0fnu).view(torch.uint8)
    assert torch.equal(stored, torch_bytes)


def test_scales_of_two_levels():
    """By hand: the matrix's inverse is amax / 2688, a tile's what is left of its amax / 6, rounded to an e4m3."""
    spec = oracle.Spec("e2m1", (1, 2), "two_level")
    found = oracle.quantize(np.array([[2688.0, -1.0, 6.0, 3.0, 0.0, 0.0, 1e-9, 0.0, 63.0, 1.0]]), spec)
    assert found.global_scale_inv == 1.0
    assert found.scale_inv.tolist() == [
        [448.0, 1.0, 1.0, 2.0**-9, 10.0]
    ]  # 10.5 lies between 10 and 11: to even
    assert found.values[0, :4].tolist() == [2688.0, -0.0, 6.0, 3.0]
    assert found.values[0, 8] == 60.0  # 6.3 times the inverse 10 is clamped
    zeros = oracle.quantize(np.zeros((2, 4)), spec)
    assert (zeros.global_scale_inv, zeros.scale_inv.tolist()) == (1.0, [[1.0, 1.0]] * 2)
    tiny = oracle.quantize(np.full((1, 2), 2.0**-149), spec)
    assert tiny.global_scale_inv == 2.0**-117
    assert tiny.scale_inv.tolist() == [[2.0**-9]]


def test_two_codes_share_a_byte_and_columns_are_added_to_whole_bytes():
    found = oracle.quantize(np.array([[6.0, -6.0, 3.0]]), oracle.Spec("e2m1", (1, 16), "two_level"))
    assert found.codes.tolist() == [[7, 15, 5, 0]]
    assert found.codes_as().tolist() == [[0xF7, 0x05]]


def test_tiles_that_do_not_divide():
    matrix = np.arange(1.0, 16.0).reshape(3, 5)
    quantized = oracle.quantize(matrix, oracle.Spec("e4m3", (2, 2)))
    expected = np.array([[7, 9, 10], [12, 14, 15]])
    np.testing.assert_array_equal(quantized.scale_inv, np.float32(1) / (448.0 / expected).astype(np.float32))


def test_non_finite_elements_take_no_part_in_the_amax():
    matrix = np.array([[1.0, np.inf, 2.0], [np.nan, -4.0, 0.5]])
    quantized = oracle.quantize(matrix, oracle.RECIPES["tensorwise"]["x"])
    assert quantized.scale_inv.item() == np.float32(1) / np.float32(112.0)
    assert quantized.codes[0, 1] == quantized.codes[1, 0] == oracle.NAN_CODE["e4m3"]
    np.testing.assert_allclose(quantized.values[0, [0, 2]], [1.0, 2.0], rtol=1e-6)


def test_a_format_without_nan_loses_the_tile_and_nothing_else():
    matrix = np.array([[1.0, np.inf, 12.0, 8.0]])
    quantized = oracle.quantize(matrix, oracle.Spec("e2m1", (1, 2), "two_level"))
    assert np.isnan(quantized.values).tolist() == [[True, True, False, False]]
    assert quantized.stored_scale_inv()[0, 0] == oracle.NAN_CODE["e4m3"]
    assert quantized.global_scale_inv == np.float32(12 / 2688)


@pytest.mark.parametrize("name", DATA_SETS, ids=list(DATA_SETS))
@on_each_recipe
def test_derived_columns_hold_the_rowwise_values_transposed(name, recipe):
    rowwise, columnwise = oracle.operands(recipe, "w", make(name, (32, 48), seed=3))
    assert columnwise.codes.shape == (48, 32)
    error = np.abs(columnwise.values - rowwise.values.T)
    if rowwise.spec.square:
        assert (error == 0).all()
    else:  # one scale a column of the weight's 32 rows; half its smallest step
        assert (error <= columnwise.scale_inv.astype(float) * 2.0**-10).all()


def test_one_wrong_code_is_over_the_budget():
    spec = oracle.RECIPES["rowwise"]["x"]
    a = oracle.quantize(oracle.to_numpy(make("gaussian", (16, 256), seed=1)), spec)
    b = oracle.quantize(oracle.to_numpy(make("gaussian", (16, 256), seed=2)), spec)
    product = oracle.Product(a.values, b.values)
    wrong = a.codes.copy()
    wrong[4, 9] += 1
    shifted = oracle.VALUES["e4m3"][wrong] * a.scale_inv
    assert excess(torch.from_numpy(shifted @ b.values.T).float(), product) > 10
    assert excess(torch.from_numpy(product.value).float(), product) <= 1
    assert excess(torch.full((16, 16), float("nan")), product) == float("inf")
    assert (product_budget(product, torch.bfloat16) >= product_budget(product, torch.float32)).all()
