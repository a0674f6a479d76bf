"""Kernels that derive the columnwise operand (N, M) from rowwise data (M, N), with their scales or scales of columns.

Matrices that follow each other, as their scales do, are one launch but for vectors.
"""

import triton
import triton.language as tl

from f8sub.kernels.triton.tile_ops import (
    LARGEST_FINITE,
    amax_bits,
    inverse,
    larger_magnitude,
    load,
    moved,
    place,
    place_in_stack,
    scale_from_amax,
    store,
    store_columns,
)


@triton.jit
def _load_values(
    codes_ptr, scale_inv_ptr, at, SCALE_STRIDE, SOURCE: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr
):
    """Dequantize each STEP-th row of a tile: float32, (ROWS / STEP, COLS); infinite beyond LARGEST_FINITE.

    Zeros beyond the matrix. ``scale_inv_ptr`` points to the first row's scales of these columns, one per row.
    """
    i, j = at.row + STEP * tl.arange(0, TILE.ROWS // STEP), at.col + tl.arange(0, TILE.COLS)
    pointers = codes_ptr + i.to(tl.int64)[:, None] * at.N + j[None, :]
    scales = scale_inv_ptr + i.to(tl.int64) * SCALE_STRIDE
    inside = (i < at.M)[:, None] & (j < at.N)[None, :]
    # data (rows, COLS) uint8, times scale_inv (rows, 1)
    codes = load(pointers, inside, TILE.WHOLE, "")
    scale_inv = load(scales, i < at.M, TILE.WHOLE, "", OTHER=1.0)
    # The values are never in memory: they are computed once for the amaxes of columns and
    # once to be cast, or once for both.
    return codes.to(SOURCE, bitcast=True).to(tl.float32) * scale_inv[:, None]


@triton.jit
def _load_halves(codes_ptr, scale_inv_ptr, at, SCALE_STRIDE, SOURCE: tl.constexpr, TILE: tl.constexpr):
    even = _load_values(codes_ptr, scale_inv_ptr, at, SCALE_STRIDE, SOURCE, 2, TILE)
    return even, _load_values(codes_ptr, scale_inv_ptr, moved(at, 1, 0), SCALE_STRIDE, SOURCE, 2, TILE)


@triton.jit
def amax_of_code_columns(
    codes_ptr, scale_inv_ptr, col_amax_ptr, M, N, SCALE_STRIDE,
    SOURCE: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Take atomic maxima of each column's values, of data with one scale per row; see ``quantize.amax_of_lines``."""
    matrix, first = place_in_stack(tl.program_id(0), M, N, TILE.ROWS * STEPS, TILE.COLS)
    codes_ptr += matrix * M * N
    scale_inv_ptr += matrix * M * SCALE_STRIDE
    ROWS: tl.constexpr = TILE.ROWS
    COLS: tl.constexpr = TILE.COLS
    largest = tl.zeros((ROWS, COLS), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        at = moved(first, step * TILE.ROWS, 0)
        values = _load_values(codes_ptr, scale_inv_ptr, at, SCALE_STRIDE, SOURCE, 1, TILE)
        largest = tl.maximum(largest, tl.abs(values))
    # A product beyond float32 counts as the largest finite number, as ``reference.dequantize`` clamps.
    amax = tl.minimum(tl.max(largest, 0), LARGEST_FINITE)
    j = first.col + tl.arange(0, TILE.COLS)
    tl.atomic_max(col_amax_ptr + matrix * N + j, amax_bits(amax), mask=j < N, sem="relaxed")


@triton.jit
def requantize_lines(
    codes_ptr, scale_inv_ptr, col_amax_ptr, col_ptr, col_scale_inv_ptr, M, N, SCALE_STRIDE,
    SOURCE: tl.constexpr, CAST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Quantize again, from one scale per row to one per column, of the columns' amaxes; the last tile comes first."""
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    matrix, at = place_in_stack(index, M, N, TILE.ROWS, TILE.COLS)
    codes_ptr += matrix * M * N
    scale_inv_ptr += matrix * M * SCALE_STRIDE
    # Words of two codes where M is even, else codes.
    col_ptr += matrix * N * (M // 2 if col_ptr.dtype.element_ty == tl.uint16 else M)
    even, odd = _load_halves(codes_ptr, scale_inv_ptr, at, SCALE_STRIDE, SOURCE, TILE)
    j = at.col + tl.arange(0, TILE.COLS)
    of_columns = matrix * N + j
    scale = scale_from_amax(tl.load(col_amax_ptr + of_columns, mask=j < N, other=0.0), CAST)
    store_columns(col_ptr, even, odd, scale[None, :], at, CAST, TILE, False)
    tl.store(col_scale_inv_ptr + of_columns, inverse(scale, CAST.POWER_OF_2), mask=(at.row == 0) & (j < N))


@triton.jit
def requantize_vectors(
    codes_ptr, scale_inv_ptr, col_ptr, col_scale_inv_ptr, M, N, SCALE_STRIDE, BLOCK_STRIDE,
    SOURCE: tl.constexpr, CAST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Quantize again, from scales of 1 x COLS to scales of ROWS x 1; one program per tile.

    Scales are (M, tiles), with BLOCK_STRIDE from one tile to the next, and become (tiles, N).
    """
    at = place(tl.program_id(0), M, N, TILE.ROWS, TILE.COLS)
    scales = scale_inv_ptr + (at.col // TILE.COLS).to(tl.int64) * BLOCK_STRIDE
    even, odd = _load_halves(codes_ptr, scales, at, SCALE_STRIDE, SOURCE, TILE)
    # (COLS,): a tile of ROWS x 1 for each column
    amax = tl.max(larger_magnitude(even, odd), 0)
    # The minimum of NaN and a number would be the number.
    scale = scale_from_amax(tl.where(amax > LARGEST_FINITE, LARGEST_FINITE, amax), CAST)
    store_columns(col_ptr, even, odd, scale[None, :], at, CAST, TILE, False)
    j = at.col + tl.arange(0, TILE.COLS)
    out = col_scale_inv_ptr + (at.row // TILE.ROWS).to(tl.int64) * N + j
    tl.store(out, inverse(scale, CAST.POWER_OF_2), mask=j < N)


@triton.jit
def transpose_codes(
    codes_ptr, scale_inv_ptr, out_ptr, out_scale_inv_ptr, M, N, EDGE: tl.constexpr, TILE: tl.constexpr
):
    """Transpose (M, N) bytes to (N, M), both even, so that both pointers are to words of 16 bits.

    Scales, unless their pointers are None, are of squares whose edge, EDGE, is a multiple of ROWS and of COLS, or of
    the whole matrix where EDGE is None.
    """
    matrix, at = place_in_stack(tl.program_id(0), M, N, TILE.ROWS, TILE.COLS)
    codes_ptr += matrix * M * (N // 2)
    out_ptr += matrix * N * (M // 2)
    i, j = tl.arange(0, TILE.ROWS // 2), tl.arange(0, TILE.COLS // 2)
    row, col = at.row, at.col
    source = codes_ptr + row.to(tl.int64) * (N // 2) + col // 2 + (2 * i)[:, None] * (N // 2) + j[None, :]
    target = out_ptr + col.to(tl.int64) * (M // 2) + row // 2 + (2 * j)[:, None] * (M // 2) + i[None, :]
    # words (ROWS / 2, COLS / 2) of even and of odd rows
    inside = (row // 2 + i < M // 2)[:, None] & (col // 2 + j < N // 2)[None, :]
    even, odd = load(source, inside, TILE.WHOLE, ""), load(source + N // 2, inside, TILE.WHOLE, "")
    # Two rows by two columns are two words: [a b], [c d] become [a c], [b d], and then the words are transposed.
    first = tl.trans((even & 0xFF) | (odd << 8))
    second = tl.trans((even >> 8) | (odd & 0xFF00))
    inside = (col // 2 + j < N // 2)[:, None] & (row // 2 + i < M // 2)[None, :]
    store(target, first, inside, TILE.WHOLE)
    store(target + M // 2, second, inside, TILE.WHOLE)
    if scale_inv_ptr is not None:
        if EDGE is None:
            is_first = (row == 0) & (col == 0)
            tl.store(out_scale_inv_ptr + matrix, tl.load(scale_inv_ptr + matrix), mask=is_first)
        else:
            # Programs of one square store the same.
            squares = matrix * tl.cdiv(M, EDGE) * tl.cdiv(N, EDGE)
            scale_inv = tl.load(scale_inv_ptr + squares + row // EDGE * tl.cdiv(N, EDGE) + col // EDGE)
            tl.store(out_scale_inv_ptr + squares + col // EDGE * tl.cdiv(M, EDGE) + row // EDGE, scale_inv)
