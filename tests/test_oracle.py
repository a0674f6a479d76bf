"""The oracle against torch's own float8 types and matmul: two independent answers to the same question."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.budgets import excess, product_budget
from tests.data_sets import DATA_SETS, edge_values, make

FORMATS = ["e4m3", "e5m2"]
on_each_format = pytest.mark.parametrize("format", FORMATS, ids=FORMATS)


def torch_codes(values: np.ndarray, format: str) -> np.ndarray:
    limit = oracle.MAX[format]
    clamped = torch.from_numpy(values).float().clamp(-limit, limit)
    return clamped.to(oracle.TORCH_DTYPES[format]).view(torch.uint8).numpy()


@on_each_format
def test_all_256_values(format):
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(oracle.TORCH_DTYPES[format]).to(torch.float64).numpy()
    np.testing.assert_array_equal(oracle.VALUES[format], expected)
    assert torch.finfo(oracle.TORCH_DTYPES[format]).max == oracle.MAX[format]


@on_each_format
def test_every_finite_value_is_its_own_nearest_code(format):
    finite = np.flatnonzero(np.isfinite(oracle.VALUES[format]))
    np.testing.assert_array_equal(oracle.nearest_code(oracle.VALUES[format][finite], format), finite)


@on_each_format
def test_ties_and_their_float32_neighbours(format):
    magnitudes = oracle.VALUES[format][:128][np.isfinite(oracle.VALUES[format][:128])]
    middles = ((magnitudes[1:] + magnitudes[:-1]) / 2).astype(np.float32)
    around = [np.nextafter(middles, np.float32(0)), middles, np.nextafter(middles, np.float32(np.inf))]
    values = np.concatenate([sign * side for sign in (1, -1) for side in around])
    np.testing.assert_array_equal(
        oracle.nearest_code(values.astype(float), format), torch_codes(values, format)
    )


@on_each_format
def test_ties_go_to_the_even_code(format):
    values = oracle.VALUES[format]
    assert oracle.nearest_code(np.array([(values[8] + values[9]) / 2]), format) == 8
    assert oracle.nearest_code(np.array([(values[9] + values[10]) / 2]), format) == 10
    assert oracle.nearest_code(np.array([values[1] / 2]), format) == 0


@on_each_format
@settings(derandomize=True)
@given(value=st.floats(-57344, 57344, width=32))
def test_any_float32_in_range(format, value):
    value = np.clip(np.array([value]), -oracle.MAX[format], oracle.MAX[format])
    np.testing.assert_array_equal(oracle.nearest_code(value, format), torch_codes(value, format))


def test_out_of_range_clamps_and_nan_stays():
    values = np.array([1e9, -1e9, np.nan, -0.0])
    assert oracle.nearest_code(values, "e4m3").tolist() == [0x7E, 0xFE, 0x7F, 0x80]
    assert oracle.nearest_code(values, "e5m2").tolist() == [0x7B, 0xFB, 0x7F, 0x80]


def test_scales():
    plain = oracle.Spec("e4m3", (None, None), power_of_two=False)
    power = oracle.Spec("e4m3", (None, None), power_of_two=True)
    amax = np.array([0.0, 448.0, 1.0, 3.0, 447.0, 1e-38, 3e38])
    assert oracle.scale_of(amax, plain)[:4].tolist() == [1.0, 1.0, 448.0, np.float32(448.0 / 3.0)]
    assert oracle.scale_of(amax, power)[:5].tolist() == [1.0, 1.0, 256.0, 128.0, 1.0]
    for spec in (plain, power):
        scale = oracle.scale_of(amax, spec)
        assert scale.dtype == np.float32
        assert np.isfinite(scale).all()
        assert np.isfinite(np.float32(1) / scale).all()
        assert (scale > 0).all()


def test_tiles_that_do_not_divide():
    matrix = np.arange(1.0, 16.0).reshape(3, 5)
    quantized = oracle.quantize(matrix, oracle.Spec("e4m3", (2, 2), power_of_two=False))
    expected = np.array([[7, 9, 10], [12, 14, 15]])
    np.testing.assert_array_equal(quantized.scale_inv, np.float32(1) / (448.0 / expected).astype(np.float32))


def test_non_finite_elements_take_no_part_in_the_amax():
    matrix = np.array([[1.0, np.inf, 2.0], [np.nan, -4.0, 0.5]])
    quantized = oracle.quantize(matrix, oracle.RECIPES["tensorwise"]["x"])
    assert quantized.scale_inv.item() == np.float32(1) / np.float32(112.0)
    assert quantized.codes[0, 1] == quantized.codes[1, 0] == oracle.NAN_CODE
    np.testing.assert_allclose(quantized.values[0, [0, 2]], [1.0, 2.0], rtol=1e-6)


@pytest.mark.parametrize("name", DATA_SETS, ids=list(DATA_SETS))
def test_derived_columns_hold_the_rowwise_values_transposed(name):
    for recipe in oracle.RECIPES:
        rowwise, columnwise = oracle.operands(recipe, "w", make(name, (32, 48), seed=3))
        assert columnwise.codes.shape == (48, 32)
        error = np.abs(columnwise.values - rowwise.values.T)
        half_smallest_step = columnwise.scale_inv.astype(float) * 2.0**-10
        assert (error <= (0 if recipe == "tensorwise" else half_smallest_step)).all()


def test_a_wrong_derivation_would_be_seen():
    weight = torch.exp(torch.linspace(-4, 0, 64)) * make("gaussian", (64, 64), seed=5)
    rowwise, derived = oracle.operands("rowwise", "w", weight)
    direct = oracle.quantize(oracle.to_numpy(weight).T, rowwise.spec)
    assert (derived.codes != direct.codes).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", oracle.RECIPES, ids=list(oracle.RECIPES))
def test_scaled_mm_is_within_the_budget_of_the_oracle(recipe, dtype):
    a, _ = oracle.operands(recipe, "x", make("lognormal", (48, 96), seed=1))
    b, _ = oracle.operands(recipe, "w", make("gaussian", (32, 96), seed=2))
    computed = torch._scaled_mm(
        a.codes_as(torch.float8_e4m3fn),
        b.codes_as(torch.float8_e4m3fn).t(),
        torch.from_numpy(a.scale_inv),
        torch.from_numpy(b.scale_inv).t(),
        out_dtype=dtype,
    )
    assert excess(computed, oracle.Product(a.values, b.values)) <= 1


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


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
def test_edge_values_have_finite_scales_and_codes(dtype):
    for matrix in edge_values(dtype).values():
        for recipe in oracle.RECIPES:
            for quantized in filter(None, oracle.operands(recipe, "dy", matrix)):
                assert np.isfinite(quantized.scale_inv).all()
                assert (quantized.scale_inv > 0).all()
                assert np.isfinite(quantized.values).all()
