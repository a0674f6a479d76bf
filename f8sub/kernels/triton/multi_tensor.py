"""Kernels over many matrices at once: their amaxes into one table, and scales of all of its entries.

A tensor of int64 lists the matrices, FIELDS numbers for each. An amax is kept as the bits of a float32, see
``quantize``; here the amax of a tile with NaN or infinity is infinity.
"""

import triton
import triton.language as tl

from f8sub.kernels.triton.tile_ops import (
    EXPONENT_BITS,
    first_scale,
    inverse,
    magnitude_bits,
    scale_from_amax,
)

ADDRESS, FIRST_PROGRAM, DTYPE, ROWS, COLS, STRIDE = map(tl.constexpr, range(6))
TILE_ROWS, TILE_COLS, ROWS_BEFORE, COLS_BEFORE, ENTRY, ENTRY_STRIDE, FIELDS = map(tl.constexpr, range(6, 13))
"""What the numbers of one matrix say: its address, the number of its dtype, its (ROWS, COLS) elements with STRIDE from
row to row, the tiles they are reduced over and how much of the first tile lies before the matrix, and the first tile's
entry in the table, with ENTRY_STRIDE from one row of tiles to the next. TILE_ROWS is 0 where tiles are whole rows."""


@triton.jit
def amaxes_of_many(
    matrices_ptr, matrix_of_program_ptr, amax_ptr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, PART: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Take atomic maxima of the elements of each tile of each matrix.

    A program reads SPAN elements of a row, or a (PART, PART) part of a block, BLOCK elements at a time.
    """
    matrix = matrices_ptr + tl.load(matrix_of_program_ptr + tl.program_id(0)) * FIELDS
    dtype = tl.load(matrix + DTYPE)
    # A master weight may have any of the three in one launch: each program branches on its matrix's.
    if dtype == 0:
        _largest_of_program(matrix, amax_ptr, tl.float32, BLOCK, SPAN, PART, ALIGNED)
    elif dtype == 1:
        _largest_of_program(matrix, amax_ptr, tl.bfloat16, BLOCK, SPAN, PART, ALIGNED)
    else:
        _largest_of_program(matrix, amax_ptr, tl.float16, BLOCK, SPAN, PART, ALIGNED)


@triton.jit
def _largest_of_program(
    matrix, amax_ptr,
    ELEMENT: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, PART: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) - tl.load(matrix + FIRST_PROGRAM)
    x_ptr = tl.load(matrix + ADDRESS).to(tl.pointer_type(ELEMENT))
    rows, cols, stride = tl.load(matrix + ROWS), tl.load(matrix + COLS), tl.load(matrix + STRIDE)
    entry, entry_stride = tl.load(matrix + ENTRY), tl.load(matrix + ENTRY_STRIDE)
    tile_rows = tl.load(matrix + TILE_ROWS)
    if ALIGNED:
        x_ptr = tl.multiple_of(x_ptr, 16)
        cols, stride = tl.multiple_of(cols, 16), tl.multiple_of(stride, 16)
    # One amax per row, or one for all: then ENTRY_STRIDE is 0, and all rows meet in one entry.
    if tile_rows == 0:
        parts = tl.cdiv(cols, SPAN)
        row, start = index // parts, (index % parts) * SPAN
        count = tl.minimum(cols - start, SPAN)
        if ALIGNED:
            count = tl.multiple_of(count, 16)
        # One row, or SPAN elements of it.
        found = _largest_of_line(x_ptr + row * stride + start, count, BLOCK)
        entry += row * entry_stride
    else:
        tile_cols = tl.load(matrix + TILE_COLS)
        rows_before, cols_before = tl.load(matrix + ROWS_BEFORE), tl.load(matrix + COLS_BEFORE)
        if ALIGNED:
            tile_cols, cols_before = tl.multiple_of(tile_cols, 16), tl.multiple_of(cols_before, 16)
        parts_in_a_row = tl.cdiv(cols_before + cols, tile_cols) * (tile_cols // PART)
        # Counted from where the first tile begins; the last column's part may lie beyond the matrix and finds nothing.
        row, col = (index // parts_in_a_row) * PART, (index % parts_in_a_row) * PART
        entry += (row // tile_rows) * entry_stride + col // tile_cols
        found = _largest_of_part(
            x_ptr, row - rows_before, col - cols_before, rows, cols, stride, BLOCK // PART, PART
        )
    # The bits of NaN come after those of infinity: the minimum makes infinity of both, as MAX over ranks needs it.
    tl.atomic_max(amax_ptr + entry, tl.minimum(found, EXPONENT_BITS), sem="relaxed")


@triton.jit
def _largest_of_line(x_ptr, count, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    # Kept elementwise over the whole span, reduced across threads once.
    largest = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, count, BLOCK):
        x = tl.load(x_ptr + start + i, mask=start + i < count, other=0.0)
        largest = tl.maximum(largest, magnitude_bits(x.to(tl.float32)))
    return tl.max(largest)


@triton.jit
def _largest_of_part(x_ptr, row, col, rows, cols, stride, HEIGHT: tl.constexpr, PART: tl.constexpr):
    # Elements that do not lie within the matrix count as 0.
    i, j = tl.arange(0, HEIGHT), col + tl.arange(0, PART)
    largest = tl.zeros((HEIGHT, PART), tl.int32)
    for start in range(0, PART, HEIGHT):
        at = row + start + i
        inside = ((at >= 0) & (at < rows))[:, None] & ((j >= 0) & (j < cols))[None, :]
        x = tl.load(x_ptr + at[:, None] * stride + j[None, :], mask=inside, other=0.0)
        largest = tl.maximum(largest, magnitude_bits(x.to(tl.float32)))
    return tl.max(largest)


@triton.jit
def scales_of_many(
    amax_ptr, prior_ptr, scale_ptr, scale_inv_ptr, SIZE,
    CAST: tl.constexpr, THROUGH: tl.constexpr, HEADROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute scales and their inverses for amaxes that are rounded to THROUGH; NaN for infinity.

    Where ``prior_ptr`` is not None and there is a prior scale, the scale is that one, lowered to what the amax needs.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    amax = tl.load(amax_ptr + i, mask=inside, other=0.0).to(THROUGH).to(tl.float32)
    is_finite = magnitude_bits(amax) < EXPONENT_BITS
    amax = tl.where(is_finite, amax, 0.0)
    scale = scale_from_amax(amax, CAST)
    if prior_ptr is not None:
        prior = tl.load(prior_ptr + i, mask=inside, other=1.0)
        # A scale of 0: none was computed so far.
        prior = tl.where(prior == 0.0, first_scale(amax, CAST, HEADROOM), prior)
        scale = tl.where(amax == 0.0, prior, tl.minimum(prior, scale))
    scale_inv = inverse(scale, CAST.POWER_OF_2 and prior_ptr is None)
    nan = float("nan")
    tl.store(scale_ptr + i, tl.where(is_finite, scale, nan), mask=inside)
    tl.store(scale_inv_ptr + i, tl.where(is_finite, scale_inv, nan), mask=inside)
