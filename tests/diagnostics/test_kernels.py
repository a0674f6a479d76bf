"""The kernels, interpreted: what plain PyTorch tells of the same matrix and codes."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

import f8sub
from f8sub import Operand, Tile
from f8sub.diagnostics import statistics
from f8sub.diagnostics.statistics import BINS, SUMS, launches_of, measure
from f8sub.kernels.triton import support
from tests.data_sets import gaussian, generator
from tests.kernels.interpreted import needs_triton

ROWS, COLS = 40, 1040


def matrix(dtype: torch.dtype, *, is_finite: bool) -> torch.Tensor:
    """Rows of all sizes and of other means, one of zeros, one with NaN, some elements that become 0."""
    rng = generator(0)
    values = gaussian((ROWS, COLS), rng) * torch.logspace(-4, 4, ROWS)[:, None]
    values *= 10.0 ** (-3 * torch.rand(ROWS, COLS, generator=rng))
    values[5], values[20] = 0.0, values[20].abs()
    if not is_finite:
        values[6, 3] = float("nan")
    return values.to(dtype)


def operands(values: torch.Tensor) -> list[Operand]:
    """All kinds of tiles and codes that kernels read; codes that are cut off; a part with a scale for each element."""
    of = [("tensorwise", "x"), ("tensorwise", "dy"), ("rowwise", "x"), ("blockwise", "x"), ("blockwise", "w")]
    made = [f8sub.quantize(values, *each, columnwise=False).rowwise for each in (*of, ("mxfp8", "x"))]
    cut = made[0]._replace(scale_inv=made[0].scale_inv / 8, data=(values * 8 / made[0].scale_inv))
    made.append(cut._replace(data=cut.data.clamp(-448, 448).to(torch.float8_e4m3fn)))
    scale = made[2].scale_inv.expand(values.shape).contiguous()
    each = replace(made[2].format, tile=Tile(1, 1))
    return [*made, Operand(made[2].data, scale, each)]


def kernels_agree(device: str, looked_at: int) -> None:
    kinds = [(torch.bfloat16, COLS), (torch.float32, 96)]
    matrices = [matrix(kind, is_finite=finite)[:, :cols] for kind, cols in kinds for finite in (True, False)]
    for values in (each.to(device) for each in matrices):
        for operand in operands(values):
            found = []
            for by_kernels in (True, False):
                takes = lambda x, by_kernels=by_kernels: by_kernels  # noqa: E731
                with (
                    mock.patch.object(support, "takes", takes),
                    mock.patch.object(statistics, "LOOKED_AT", looked_at),
                ):
                    found.append([each.cpu() for each in measure(values, operand)])
            (sums, maxima), (right, right_maxima) = found
            torch.testing.assert_close(maxima, right_maxima, rtol=0, atol=0, equal_nan=True)
            counts = slice(0, SUMS.index("signal"))
            assert torch.equal(sums[counts], right[counts]), operand.format
            squares = slice(SUMS.index("signal"), SUMS.index("total"))
            torch.testing.assert_close(sums[squares], right[squares], rtol=1e-5, atol=0, equal_nan=True)
            # Terms of both signs: what rounding loses is small beside their magnitudes.
            for name, square in (("total", "signal"), ("error", "noise")):
                at, size = SUMS.index(name), (right[SUMS.index(square)] * right[0]).sqrt().nan_to_num()
                assert (sums[at] - right[at]).abs() <= 1e-6 * size or (sums[at].isnan() and right[at].isnan())
                assert right[at].isnan() or right[at].abs() > 1e-5 * size
            # A row at the edge of a bin may lie in its neighbour: the logarithms are not the same.
            bins, right_bins = (each[len(SUMS) :].cumsum(0) for each in (sums, right))
            assert bins[-1] == right_bins[-1] > 0
            assert ((bins - right_bins).abs() <= 1).all()
            assert len(bins) == BINS


@needs_triton
@pytest.mark.parametrize(
    "looked_at", [pytest.param(2**21, marks=pytest.mark.long), ROWS * COLS // 3], ids=["all", "some rows"]
)
def test_kernels_tell_what_plain_pytorch_does(interpreter, looked_at):
    interpreter(kernels_agree, "cpu", looked_at)


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_kernels_compile_for_hopper(recipe):
    from tests.kernels.compiled import compiler

    values = torch.zeros(256, 512, dtype=torch.bfloat16)
    operand = f8sub.quantize(values, recipe, "dy", columnwise=False).rowwise
    row = torch.zeros(statistics.WIDTH), torch.zeros(len(statistics.MAXIMA))
    constants = statistics._constants(operand.format)
    for launch in launches_of(values, operand, operand.scale_inv, 2, *row, constants):
        _, usage = compiler.disassembled(compiler.compiled(launch).asm["cubin"])
        assert "LOCAL:0" in usage
