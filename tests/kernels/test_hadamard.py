"""The transform itself, and where quantizers apply it."""

import subprocess
import sys

import pytest
import torch

from f8sub import Float8Format, ScaleRule, Tile
from f8sub.formats import E2M1
from f8sub.kernels import reference
from f8sub.kernels.fp4 import rotate
from tests.budgets import gamma
from tests.data_sets import gaussian, generator


@pytest.mark.parametrize("size", [2, 16, 32], ids=str)
def test_the_transform_is_orthogonal_and_undone(size):
    matrix = rotate(torch.eye(size), size)
    assert torch.allclose(matrix @ matrix.t(), torch.eye(size), rtol=0, atol=1e-6)
    assert set(matrix.abs().flatten().tolist()) == {matrix[0, 0].abs().item()}
    x = gaussian((5, 4 * size), generator(1))
    back = rotate(rotate(x, size), size, inverse=True)
    assert torch.allclose(back, x, rtol=0, atol=float(gamma(2 * size + 4) * x.abs().sum()))


def test_every_process_has_the_same_transform_whatever_its_seed():
    code = (
        "import torch; torch.manual_seed(7); from f8sub.kernels.fp4 import rotate; "
        "print(rotate(torch.eye(16), 16).sign().int().tolist())"
    )
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    matrix = rotate(torch.eye(16), 16).sign().int().tolist()
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
        expected = reference.quantize(rotate(whole, 16), plain, None)[0]
        assert operand.shape == whole.shape
        assert torch.equal(operand.data.view(torch.uint8), expected.data.view(torch.uint8))
        error = (reference.dequantize(operand, torch.float32) - whole).norm()
        assert error <= 0.2 * whole.norm()
