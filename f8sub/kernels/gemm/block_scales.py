"""Lays out float32 scales of blocks as cuBLASLt reads them on Hopper.

Source: "1D Block Scaling Factors Layout" of cuBLAS's documentation, and the checks of ATen/native/cuda/ScaledBlas.cpp.
"""

import torch
from torch.nn.functional import pad

from f8sub.formats import ALL, Float8Format, Operand, Tile

BLOCK = 128
"""Elements of K under one float32 scale. Source: cuBLASLt's VEC128_32F and BLK128x128_32F, CUDA 12.9, SM 9.0."""

ALIGNMENT = 16
"""cuBLASLt takes matrices whose dimensions are multiples of 16, or of 16 bytes. Source: ScaledBlas.cpp."""

_SQUARES_ALIGNMENT = 4
"""A row of 128x128 scales begins at a multiple of 16 bytes. Source: the same file."""


def empty_scale_inv(like: torch.Tensor, format: Float8Format, rows: int, depth: int) -> torch.Tensor:
    """Return memory for a matrix's ``scale_inv``, (rows / tile, K / tile): column-major for 1x128, as ``vectors``."""
    lines, blocks = format.tile.scale_shape((rows, depth))
    if _is_column_major(format):
        # As cuBLASLt reads 1x128: all rows' scales of one block side by side, so that no GEMM has to copy them.
        return like.new_empty((blocks, lines), dtype=torch.float32).t()
    return like.new_empty((lines, blocks), dtype=format.scale_rule.stored_as)


def flat(operand: Operand) -> torch.Tensor:
    """Return ``operand.scale_inv`` in one dimension, as it lies in memory; of an operand that ``is_laid_out``."""
    scale_inv = operand.scale_inv
    return (scale_inv.t() if _is_column_major(operand.format) else scale_inv).view(-1)


def unflat(operand: Operand) -> Operand:
    """Return ``operand`` with the matrix of scales that ``flat`` was given; one that has it comes back as it is."""
    if operand.scale_inv.dim() == 2:
        return operand
    lines, blocks = operand.format.tile.scale_shape(operand.shape)
    if _is_column_major(operand.format):
        return operand._replace(scale_inv=operand.scale_inv.view(blocks, lines).t())
    return operand._replace(scale_inv=operand.scale_inv.view(lines, blocks))


def is_laid_out(operand: Operand) -> bool:
    """Return whether ``operand.scale_inv`` has the strides of ``empty_scale_inv``, even where a dimension is 1."""
    lines, blocks = operand.scale_inv.shape
    expected = (1, max(lines, 1)) if _is_column_major(operand.format) else (max(blocks, 1), 1)
    return operand.scale_inv.stride() == expected


def _is_column_major(format: Float8Format) -> bool:
    return format.is_plain and (format.tile.rows, format.tile.cols) == (1, BLOCK)


def whole_blocks(edge: int, size: int) -> bool:
    """Return whether a tile's edge is a multiple of blocks of ``size`` elements, or all of them."""
    return edge == ALL or edge % size == 0


def spread(operand: Operand, rows: int, cols: int, *, transposed: bool = False) -> torch.Tensor:
    """Return ``scale_inv`` of every block of (rows, cols), repeated for the blocks of larger tiles, by one copy.

    It is (blocks of rows, blocks of K), or the other way round where ``transposed``; a view where nothing is repeated.
    """
    tile, scale_inv = operand.format.tile, operand.scale_inv
    count = Tile(rows, cols).scale_shape(operand.shape)
    down, along = (
        blocks if edge == ALL else edge // size
        for blocks, edge, size in zip(count, (tile.rows, tile.cols), (rows, cols), strict=True)
    )
    # As bytes where they are bytes: torch copies those.
    plain = scale_inv if scale_inv.dtype == torch.float32 else scale_inv.view(torch.uint8)
    # [tiles of rows, blocks in a tile, tiles of K, blocks in a tile]: a view, which reshape copies once.
    repeated = plain[:, None, :, None].expand(-1, down, -1, along)
    if transposed:
        repeated, count = repeated.permute(2, 3, 0, 1), count[::-1]
    lines = repeated.shape
    matrix = repeated.reshape(lines[0] * lines[1], lines[2] * lines[3])
    return matrix[: count[0], : count[1]].view(scale_inv.dtype)


def vectors(operand: Operand) -> torch.Tensor:
    """Return scales of 1x128: float32, (rows filled up to a multiple of 16, blocks), column-major."""
    # Stored so already, as kernels store it: nothing is copied.
    if _is_column_major(operand.format) and is_laid_out(operand) and not operand.shape[0] % ALIGNMENT:
        return operand.scale_inv
    return _filled(spread(operand, 1, BLOCK, transposed=True), ALIGNMENT).t()


def squares(operand: Operand) -> torch.Tensor:
    """Return scales of 128x128: float32, (blocks of K filled up to a multiple of 4, blocks of rows), column-major."""
    fills_rows = operand.scale_inv.shape[1] % _SQUARES_ALIGNMENT == 0
    if operand.format.tile == Tile(BLOCK, BLOCK) and is_laid_out(operand) and fills_rows:
        return operand.scale_inv.t()
    return _filled(spread(operand, BLOCK, BLOCK), _SQUARES_ALIGNMENT).t()


def _filled(scales: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return row-major scales whose rows are filled up with ones to a multiple of so many."""
    rows, cols = scales.shape
    if cols % multiple:
        laid_out = scales.new_ones(rows, cols + -cols % multiple)
        laid_out[:, :cols] = scales
        return laid_out
    # Not is_contiguous(): one row or column counts as that with any strides.
    return scales if scales.stride() == (cols, 1) else scales.clone(memory_format=torch.contiguous_format)


def aligned(codes: torch.Tensor) -> torch.Tensor:
    """Return float8 data filled up with zeros to what cuBLASLt takes."""
    rows, cols = codes.shape
    missing_rows, missing_cols = -rows % ALIGNMENT, -cols % ALIGNMENT
    if not missing_rows and not missing_cols:
        return codes
    return pad(codes.view(torch.uint8), (0, missing_cols, 0, missing_rows)).view(codes.dtype)


def cut(y: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Return a product of filled up operands without what filled them up."""
    return y if y.shape == (rows, cols) else y[:rows, :cols]
