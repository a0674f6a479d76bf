"""Layer 1. Scales of blocks, laid out as cuBLASLt reads them: Hopper's float32, Blackwell's single bytes.

Source: "1D Block Scaling Factors Layout" of cuBLAS's documentation, and the checks of ATen/native/cuda/ScaledBlas.cpp.
"""

import torch

from f8sub.formats import ALL, Operand, Tile
from f8sub.kernels import reference

BLOCK = 128
"""Elements of K under one float32 scale. Source: cuBLASLt's VEC128_32F and BLK128x128_32F, CUDA 12.9, SM 9.0."""

ALIGNMENT = 16
"""cuBLASLt takes matrices whose dimensions are multiples of 16, or of 16 bytes. Source: ScaledBlas.cpp."""

_SQUARES_ALIGNMENT = 4
"""A row of 128x128 scales begins at a multiple of 16 bytes. Source: the same file."""

_ATOM_ROWS, _ATOM_COLS, _ATOM_BANDS = 128, 4, 4
"""Scales of one byte come in atoms of 128 rows by 4 blocks, four bands of 32 rows interleaved: SWIZZLE_32_4_4."""


def whole_blocks(edge: int, size: int) -> bool:
    """Whether a tile's edge is made of whole blocks of ``size`` elements."""
    return edge == ALL or edge % size == 0


def spread(operand: Operand, rows: int, cols: int) -> torch.Tensor:
    """``scale_inv`` of every block of (rows, cols), repeated for the blocks of larger tiles.

    Returns:
        ``operand.scale_inv``'s dtype, (blocks of rows, blocks of K).
    """
    tile, scale_inv = operand.format.tile, operand.scale_inv
    count = torch.Size(Tile(rows, cols).scale_shape(operand.shape))
    in_blocks = Tile(
        ALL if tile.rows == ALL else tile.rows // rows, ALL if tile.cols == ALL else tile.cols // cols
    )
    # As bytes where they are bytes: torch repeats those.
    plain = scale_inv if scale_inv.dtype == torch.float32 else scale_inv.view(torch.uint8)
    return reference.spread(plain, in_blocks, count).expand(count).view(scale_inv.dtype)


def vectors(operand: Operand) -> torch.Tensor:
    """Scales of 1x128.

    Returns:
        float32, (rows filled up to a multiple of 16, blocks), column-major.
    """
    scales = spread(operand, 1, BLOCK)
    rows, blocks = scales.shape
    if rows % ALIGNMENT == 0:
        # Not contiguous(): of one block a transposed view counts as that, with other strides than a copy's.
        return scales.t().clone(memory_format=torch.contiguous_format).t()
    laid_out = scales.new_ones(blocks, rows + -rows % ALIGNMENT)
    laid_out[:, :rows] = scales.t()
    return laid_out.t()


def squares(operand: Operand) -> torch.Tensor:
    """Scales of 128x128.

    Returns:
        float32, (blocks of K filled up to a multiple of 4, blocks of rows), column-major.
    """
    scales = spread(operand, BLOCK, BLOCK)
    rows, blocks = scales.shape
    laid_out = scales.new_ones(rows, blocks + -blocks % _SQUARES_ALIGNMENT)
    laid_out[:, :blocks] = scales
    return laid_out.t()


def swizzled(operand: Operand, size: int) -> torch.Tensor:
    """Scales of 1 x ``size``, one byte each, in SWIZZLE_32_4_4.

    Within an atom the scale of row r and block c is byte ``16 * (r % 32) + 4 * (r // 32) + c``; atoms are row-major.

    Returns:
        ``operand.scale_inv``'s dtype, flat; rows filled up to a multiple of 128, blocks to a multiple of 4, with zero
        bytes, which meet no codes but zeros.
    """
    scales = spread(operand, 1, size)
    rows, blocks = scales.shape
    filled = torch.nn.functional.pad(
        scales.view(torch.uint8), (0, -blocks % _ATOM_COLS, 0, -rows % _ATOM_ROWS)
    )
    atoms = filled.view(-1, _ATOM_BANDS, _ATOM_ROWS // _ATOM_BANDS, filled.shape[1] // _ATOM_COLS, _ATOM_COLS)
    return atoms.permute(0, 3, 2, 1, 4).flatten().view(scales.dtype)
