"""Scales of blocks in the layouts that cuBLASLt documents."""

import pytest
import torch

from f8sub import ALL, Float8Format, Operand, Tile
from f8sub.kernels import reference
from f8sub.kernels.gemm import block_scales
from tests.data_sets import generator, row_outliers
from tests.kernels.products import E4M3

TILES = {
    "1x128": (1, 128),
    "128x128": (128, 128),
    "256x256": (256, 256),
    "row": (1, ALL),
    "tensor": (ALL, ALL),
    "allx128": (ALL, 128),
}


@pytest.mark.parametrize("shape", [(272, 656), (13, 40), (1, 1), (1, 130), (256, 512)], ids=str)
@pytest.mark.parametrize(
    ("tile", "rows"),
    [(tile, rows) for tile in TILES.values() for rows in (1, 128) if rows == 1 or tile[0] != 1],
    ids=str,
)
def test_scales_of_blocks(tile, rows, shape):
    """What lies under each block is the scale of every element in it, in the layout that is asked for."""
    matrix = row_outliers(shape, generator(4))
    operand = reference.quantize(matrix, Float8Format(E4M3, Tile(*tile)), None)[0]
    found = block_scales.vectors(operand) if rows == 1 else block_scales.squares(operand)
    assert found.stride(0) == 1
    by_rows = found if rows == 1 else found.t()
    assert by_rows.shape[0] == (shape[0] + -shape[0] % 16 if rows == 1 else -(-shape[0] // 128))
    assert found.stride(1) == found.shape[0]
    assert found.shape[0] % (16 if rows == 1 else 4) == 0
    spread = by_rows.repeat_interleave(rows, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    expected = reference.spread(operand.scale_inv, Tile(*tile), matrix.shape).expand(shape)
    assert torch.equal(spread, expected)


@pytest.mark.parametrize(
    "shape", [(272, 656), (13, 40), (1, 1), (1, 130), (256, 512), (512, 1), (0, 5), (5, 0)], ids=str
)
@pytest.mark.parametrize("tile", TILES.values(), ids=str)
def test_scales_are_laid_out_where_their_strides_are_those_that_kernels_fill(tile, shape):
    format = Float8Format(E4M3, Tile(*tile))
    data = torch.zeros(shape, dtype=E4M3)
    filled = block_scales.empty_scale_inv(data, format, *shape)
    lines, blocks = filled.shape
    for scale_inv in (
        filled,
        torch.empty(lines, blocks),
        torch.empty(blocks, lines).t(),
        torch.empty(lines, blocks + 1)[:, :blocks],
        torch.empty(lines, 2 * blocks)[:, ::2],
    ):
        operand = Operand(data, scale_inv, format)
        assert block_scales.is_laid_out(operand) == (scale_inv.stride() == filled.stride())


@pytest.mark.parametrize("tile", TILES.values(), ids=str)
def test_flat_scales_are_the_same_memory(tile):
    format = Float8Format(E4M3, Tile(*tile))
    data = torch.zeros(272, 656, dtype=E4M3)
    scale_inv = block_scales.empty_scale_inv(data, format, 272, 656)
    scale_inv.copy_(torch.rand(scale_inv.shape))
    flat = block_scales.flat(Operand(data, scale_inv, format))
    assert flat.shape == (scale_inv.numel(),)
    found = block_scales.unflat(Operand(data, flat, format))
    assert torch.equal(found.scale_inv, scale_inv)
    assert found.scale_inv.stride() == scale_inv.stride()
    assert found.scale_inv.data_ptr() == scale_inv.data_ptr()
    assert block_scales.unflat(found) is found


def test_scales_that_are_laid_out_are_not_copied():
    matrix = row_outliers((272, 656), generator(4))
    operand = reference.quantize(matrix, Float8Format(E4M3, Tile(1, 128)), None)[0]
    scale_inv = block_scales.empty_scale_inv(matrix, operand.format, *operand.shape).copy_(operand.scale_inv)
    assert block_scales.vectors(operand._replace(scale_inv=scale_inv)) is scale_inv
    operand = reference.quantize(matrix[:, :512], Float8Format(E4M3, Tile(128, 128)), None)[0]
    assert block_scales.squares(operand).data_ptr() == operand.scale_inv.data_ptr()
