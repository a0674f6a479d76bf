"""Four-bit codes: packing, stochastic rounding, and the Hadamard transform that goes before them."""

import math
import subprocess
import sys

import pytest
import torch

from f8sub import Float8Format, ScaleRule, Tile
from f8sub.formats import E2M1, Rounding
from f8sub.kernels import e2m1, reference
from tests import oracle
from tests.budgets import gamma
from tests.data_sets import gaussian, generator

DRAWS, CHANCE_OF_FAILURE = 4096, 1e-9


def test_every_byte_is_unpacked_and_packed_again():
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    unpacked = e2m1.unpack(codes.view(E2M1))
    assert torch.equal(unpacked[:, ::2], codes % 16)
    assert torch.equal(unpacked[:, 1::2], codes // 16)
    assert torch.equal(e2m1.pack(unpacked).view(torch.uint8), codes)
    assert e2m1.values(torch.arange(16, dtype=torch.uint8)).tolist() == oracle.VALUES["e2m1"].tolist()


def grid() -> torch.Tensor:
    """Codes, ties and values in between."""
    return torch.linspace(-6.0, 6.0, 193)


def test_stochastic_rounding_goes_to_a_neighbour_and_is_right_on_average():
    """A draw is within one step of its neighbours: Hoeffding's bound on the mean of 4096 draws is 0.058 steps."""
    torch.manual_seed(0)
    exact = grid().double()
    drawn = e2m1.values(e2m1.cast(grid().expand(DRAWS, -1), Rounding.STOCHASTIC)).double()
    codes = torch.tensor(sorted(set(oracle.VALUES["e2m1"].tolist())), dtype=torch.float64)
    upper = codes[torch.searchsorted(codes, exact)]
    lower = codes[torch.searchsorted(codes, exact, right=True) - 1]
    assert ((drawn == lower) | (drawn == upper)).all()
    bound = math.sqrt(math.log(2 * exact.numel() / CHANCE_OF_FAILURE) / (2 * DRAWS))
    assert ((drawn.mean(0) - exact).abs() <= bound * (upper - lower)).all()
    nearest = e2m1.values(e2m1.cast(grid()[None], Rounding.NEAREST)).double()[0]
    assert ((nearest - exact).abs() > bound * (upper - lower)).any()


def test_the_draws_are_of_torchs_generator_and_nearest_takes_none():
    x = gaussian((8, 64), generator(1))
    torch.manual_seed(3)
    first, second = (e2m1.cast(x, Rounding.STOCHASTIC) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(e2m1.cast(x, Rounding.STOCHASTIC), first)
    state = torch.get_rng_state()
    e2m1.cast(x, Rounding.NEAREST)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("size", [2, 16, 32], ids=str)
def test_the_transform_is_orthogonal_and_undone(size):
    matrix = e2m1.rotate(torch.eye(size), size)
    assert torch.allclose(matrix @ matrix.t(), torch.eye(size), rtol=0, atol=1e-6)
    assert set(matrix.abs().flatten().tolist()) == {matrix[0, 0].abs().item()}
    x = gaussian((5, 4 * size), generator(1))
    back = e2m1.rotate(e2m1.rotate(x, size), size, inverse=True)
    assert torch.allclose(back, x, rtol=0, atol=float(gamma(2 * size + 4) * x.abs().sum()))


def test_every_process_has_the_same_transform_whatever_its_seed():
    code = (
        "import torch; torch.manual_seed(7); from f8sub.kernels import e2m1; "
        "print(e2m1.rotate(torch.eye(16), 16).sign().int().tolist())"
    )
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    matrix = e2m1.rotate(torch.eye(16), 16).sign().int().tolist()
    assert other.strip() == str(matrix)
    assert len({tuple(row) for row in matrix}) == 16


@pytest.mark.parametrize("tile", [Tile(1, 16), Tile(16, 16)], ids=str)
@pytest.mark.parametrize("shape", [(32, 48), (13, 24), (1, 7)], ids=str)
def test_both_usages_are_rotated_along_their_own_rows(shape, tile):
    """Filled up with zeros to whole transforms; no transposed bytes even where both have square tiles."""
    format = Float8Format(E2M1, tile, ScaleRule.TWO_LEVEL, hadamard=16)
    x = gaussian(shape, generator(1))
    for operand, seen in zip(reference.quantize(x, format, format)[:2], (x, x.t()), strict=True):
        whole = torch.nn.functional.pad(seen, (0, -seen.shape[1] % 16))
        plain = Float8Format(E2M1, tile, ScaleRule.TWO_LEVEL)
        expected = reference.quantize(e2m1.rotate(whole, 16), plain, None)[0]
        assert operand.shape == whole.shape
        assert torch.equal(operand.data.view(torch.uint8), expected.data.view(torch.uint8))
        error = (reference.dequantize(operand, torch.float32) - whole).norm()
        assert error <= 0.2 * whole.norm()
