"""Statistics of an operand against float64, and the advice for data sets with a known trouble."""

import pytest
import torch

import f8sub
from f8sub.diagnostics.sample import part_of
from f8sub.diagnostics.statistics import RULES, WIDTH, advice_for, measure, statistics_of
from f8sub.kernels import reference
from tests.data_sets import gaussian, generator

ROWS, COLS = 48, 256


def told(values: torch.Tensor, recipe: str, operand: str = "x"):
    made = f8sub.quantize(values, recipe, operand, columnwise=False).rowwise
    measured = measure(values, made)
    return statistics_of(0, "a", operand, made.format, measured.sums.tolist(), measured.maxima.tolist())


def normal(rng) -> torch.Tensor:
    return gaussian((ROWS, COLS), rng)


def outliers(rng) -> torch.Tensor:
    """One row a million times the others."""
    values = gaussian((ROWS, COLS), rng)
    values[3] *= 1e6
    return values


def wide(rng) -> torch.Tensor:
    """Magnitudes over 20 powers of ten in each row."""
    return gaussian((ROWS, COLS), rng) * 10.0 ** torch.empty(ROWS, COLS).uniform_(-20, 0, generator=rng)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize(
    "data", [lambda rng: gaussian((ROWS, COLS), rng), outliers, wide], ids=["gaussian", "outliers", "wide"]
)
def test_numbers_are_those_of_float64(recipe, data):
    values = data(generator(0)).bfloat16()
    tensor = f8sub.quantize(values, recipe, "x", columnwise=False)
    made, exact = tensor.dequantize().double(), values.double()
    signal, noise = exact.square(), (f8sub_float(tensor) - exact).square()
    nonzero = exact != 0
    found = told(values, recipe)
    assert found.amax == exact.abs().amax().item()
    assert found.rms == pytest.approx(signal.mean().sqrt().item(), rel=1e-5)
    rms = found.rms
    assert found.mean == pytest.approx(exact.mean().item(), abs=1e-6 * rms)
    error = (f8sub_float(tensor) - exact).mean().item()
    assert found.bias == pytest.approx(error / rms, abs=1e-6)
    assert found.sqnr == pytest.approx(10 * (signal.sum() / noise.sum()).log10().item(), abs=0.01)
    assert found.flushed == pytest.approx(
        ((made == 0) & nonzero).double().sum().item() / nonzero.sum().item(), abs=1e-6
    )
    rows = (10 * (signal.sum(1) / noise.sum(1)).log10()).clamp(-20, 64)
    assert found.row_sqnr == pytest.approx(rows.median().item(), abs=0.75)


def f8sub_float(tensor: f8sub.Float8Tensor) -> torch.Tensor:
    """What codes and scales stand for, in float64."""
    wide = f8sub.Float8Tensor(tensor.rowwise, None, torch.float32)
    return wide.dequantize().double()


def test_a_mean_and_a_cast_that_shrinks_are_seen():
    values = torch.full((4, 64), 3.0)
    values[:, ::4] = 448.0
    cut = f8sub.quantize(values, "tensorwise", "x", columnwise=False).rowwise
    cut = cut._replace(data=torch.full_like(cut.data.float(), 2.0).to(cut.data.dtype))
    found = statistics_of(0, "a", "x", cut.format, *(each.tolist() for each in measure(values, cut)))
    assert found.mean == pytest.approx((448 + 9) / 4)
    assert found.bias == pytest.approx((2 - (448 + 9) / 4) / found.rms)


def test_codes_are_counted():
    values = torch.zeros(2, 32)
    values[0, :4] = torch.tensor([448.0, -448.0, 1e-6, 2.0**-8])
    found = told(values, "tensorwise")
    assert (found.saturated, found.flushed, found.subnormal) == (0.0, 0.25, 0.25)
    assert found.scale_min == found.scale_max == 1.0


def test_parts_of_a_matrix_add_up():
    values = outliers(generator(1))
    whole = f8sub.quantize(values, "rowwise", "x", columnwise=False).rowwise
    parts = [
        measure(values[at], whole._replace(data=whole.data[at], scale_inv=whole.scale_inv[at]))
        for at in (slice(0, 10), slice(10, ROWS))
    ]
    sums = torch.stack([part.sums for part in parts]).sum(0)
    maxima = torch.stack([part.maxima for part in parts]).amax(0)
    assert sums.shape == (WIDTH,)
    added = statistics_of(0, "a", "x", whole.format, sums.tolist(), maxima.tolist())
    expected = told(values, "rowwise")
    assert added.row_sqnr == expected.row_sqnr
    assert added.sqnr == pytest.approx(expected.sqnr, abs=1e-4)
    for name in ("amax", "rms", "scale_min", "scale_max"):
        assert getattr(added, name) == pytest.approx(getattr(expected, name))
    # Positive and negative terms add up in another order.
    for name, size in (("mean", expected.rms), ("bias", 1.0)):
        assert getattr(added, name) == pytest.approx(getattr(expected, name), abs=1e-7 * size)


def between_codes() -> torch.Tensor:
    """Magnitudes of 5 beside 6, where e2m1 has nothing between 4 and 6."""
    values = torch.full((ROWS, COLS), 5.0)
    values[:, ::16] = 6.0
    return values


TROUBLES = {
    "outliers": lambda: told(outliers(generator(0)), "tensorwise"),
    "flushed": lambda: told(wide(generator(0)), "rowwise"),
    "saturated": lambda: outgrown(),
    "poor": lambda: told(between_codes(), "nvfp4"),
}


def outgrown():
    """With the scale of values an eighth as large."""
    values = gaussian((ROWS, COLS), generator(0))
    made = f8sub.quantize(values / 8, "tensorwise", "x", columnwise=False).rowwise
    codes = (values / made.scale_inv).clamp(-448, 448).to(torch.float8_e4m3fn)
    measured = measure(values, made._replace(data=codes))
    return statistics_of(0, "a", "x", made.format, measured.sums.tolist(), measured.maxima.tolist())


@pytest.mark.parametrize("trouble", TROUBLES)
def test_each_trouble_has_its_advice(trouble):
    rule = next(rule for rule in RULES if rule.name == trouble)
    assert advice_for(TROUBLES[trouble]()) == rule.advice


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_nothing_is_wrong_with_a_gaussian(recipe):
    assert advice_for(told(gaussian((ROWS, COLS), generator(0)), recipe)) == ""


def test_no_elements_are_no_row():
    assert statistics_of(0, "a", "x", f8sub.get_recipe("rowwise").fprop.a, [0.0] * WIDTH, [0.0] * 3) is None


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("place", [(0, 0, 128, 256), (0, 0, 37, 256), (24, 32, 40, 96), (5, 128, 128, 128)])
def test_a_part_of_an_operand_stands_for_the_same_values(recipe, place):
    """Shards begin wherever they do, within a tile too."""
    w = gaussian((160, 256), generator(0)) * gaussian((160, 1), generator(1)).exp()
    operand = f8sub.quantize(w, recipe, "w", columnwise=False).rowwise
    row, col, rows, cols = place
    found = reference.dequantize(part_of(operand, *place), torch.float32)
    whole = reference.dequantize(operand, torch.float32)
    # Two scales are multiplied by each other first, where the whole has them one after the other.
    rounding = 2.0**-22 if recipe == "nvfp4" else 0
    torch.testing.assert_close(found, whole[row : row + rows, col : col + cols], rtol=rounding, atol=0)
