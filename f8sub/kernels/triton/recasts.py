"""Kernels that make the columnwise usage of rowwise codes whose scales are of parts of rows.

Values are what ``reference.dequantize`` makes of codes, and are never in memory: codes times the inverse of their
scale, float32, read once for the amaxes of columns and once to be cast, or once for both.
"""

import triton
import triton.language as tl

from f8sub.kernels.triton.tiles import (
    LARGEST_FINITE,
    amax_bits,
    inverse,
    larger_magnitude,
    place,
    scale_from_amax,
    scaled,
    store_transposed,
    words,
)


@triton.jit
def load_values(
    codes_ptr,
    scale_inv_ptr,
    row,
    col,
    M,
    N,
    SCALE_STRIDE,
    SOURCE: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """What the codes of ROWS rows, each STEP-th from ``row`` on, stand for: float32; infinite beyond LARGEST_FINITE.

    Zeros beyond the matrix. ``scale_inv_ptr`` points to the first row's scales of these columns, one a row.
    """
    i, j = row + STEP * tl.arange(0, ROWS), col + tl.arange(0, COLS)
    pointers = codes_ptr + i.to(tl.int64)[:, None] * N + j[None, :]
    if WHOLE:
        codes = tl.load(pointers)
        scale_inv = tl.load(scale_inv_ptr + i.to(tl.int64) * SCALE_STRIDE)
    else:
        codes = tl.load(pointers, mask=(i < M)[:, None] & (j < N)[None, :], other=0)
        scale_inv = tl.load(scale_inv_ptr + i.to(tl.int64) * SCALE_STRIDE, mask=i < M, other=1.0)
    return codes.to(SOURCE, bitcast=True).to(tl.float32) * scale_inv[:, None]


@triton.jit
def amax_of_code_columns(
    codes_ptr,
    scale_inv_ptr,
    col_amax_ptr,
    M,
    N,
    SCALE_STRIDE,
    SOURCE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Maxima with what is there of the values of each column, of codes with one scale a row.

    A program goes down STEPS tiles of the same columns, whose amaxes it reduces once.
    """
    first, col = place(tl.program_id(0), M, N, ROWS * STEPS, COLS)
    largest = tl.zeros((ROWS, COLS), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        row = first + step * ROWS
        values = load_values(
            codes_ptr, scale_inv_ptr, row, col, M, N, SCALE_STRIDE, SOURCE, 1, ROWS, COLS, WHOLE
        )
        largest = tl.maximum(largest, tl.abs(values))
    amax = tl.minimum(tl.max(largest, 0), LARGEST_FINITE)
    j = col + tl.arange(0, COLS)
    tl.atomic_max(col_amax_ptr + j, amax_bits(amax), mask=j < N, sem="relaxed")


@triton.jit
def recast_by_lines(
    codes_ptr,
    scale_inv_ptr,
    col_amax_ptr,
    col_ptr,
    col_scale_inv_ptr,
    M,
    N,
    SCALE_STRIDE,
    SOURCE: tl.constexpr,
    TOP: tl.constexpr,
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """From one scale a row to one scale a column, of the columns' amaxes. Tiles are taken last one first."""
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    row, col = place(index, M, N, ROWS, COLS)
    even = load_values(
        codes_ptr, scale_inv_ptr, row, col, M, N, SCALE_STRIDE, SOURCE, 2, ROWS // 2, COLS, WHOLE
    )
    odd = load_values(
        codes_ptr, scale_inv_ptr, row + 1, col, M, N, SCALE_STRIDE, SOURCE, 2, ROWS // 2, COLS, WHOLE
    )
    j = col + tl.arange(0, COLS)
    scale = scale_from_amax(tl.load(col_amax_ptr + j, mask=j < N, other=0.0), TOP, POWER_OF_2)
    made = words(scaled(even, scale[None, :], TOP, False), scaled(odd, scale[None, :], TOP, False), CODES)
    store_transposed(col_ptr, made, row, col, M, N, ROWS, COLS, WHOLE)
    tl.store(col_scale_inv_ptr + j, inverse(scale, POWER_OF_2), mask=(row == 0) & (j < N))


@triton.jit
def recast_by_vectors(
    codes_ptr,
    scale_inv_ptr,
    col_ptr,
    col_scale_inv_ptr,
    M,
    N,
    SCALE_STRIDE,
    BLOCK_STRIDE,
    SOURCE: tl.constexpr,
    TOP: tl.constexpr,
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """From scales of 1 x COLS to scales of ROWS x 1, a tile a program.

    Scales are (M, tiles) with BLOCK_STRIDE from one tile to the next, and (tiles, N).
    """
    row, col = place(tl.program_id(0), M, N, ROWS, COLS)
    scales = scale_inv_ptr + (col // COLS).to(tl.int64) * BLOCK_STRIDE
    even = load_values(codes_ptr, scales, row, col, M, N, SCALE_STRIDE, SOURCE, 2, ROWS // 2, COLS, WHOLE)
    odd = load_values(codes_ptr, scales, row + 1, col, M, N, SCALE_STRIDE, SOURCE, 2, ROWS // 2, COLS, WHOLE)
    amax = tl.max(larger_magnitude(even, odd), 0)
    # Not the minimum of the two, which of NaN and a number is the number.
    amax = tl.where(amax > LARGEST_FINITE, LARGEST_FINITE, amax)
    scale = scale_from_amax(amax, TOP, POWER_OF_2)
    made = words(scaled(even, scale[None, :], TOP, False), scaled(odd, scale[None, :], TOP, False), CODES)
    store_transposed(col_ptr, made, row, col, M, N, ROWS, COLS, WHOLE)
    j = col + tl.arange(0, COLS)
    at = col_scale_inv_ptr + (row // ROWS).to(tl.int64) * N + j
    tl.store(at, inverse(scale, POWER_OF_2), mask=j < N)
