"""Kernels for scales of blocks: amax, scale and codes of both usages in one pass."""

import triton
import triton.language as tl

from f8sub.kernels.triton.tiles import (
    codes,
    inverse,
    larger_magnitude,
    load_finite_halves,
    place,
    scale_from_amax,
    scaled,
    store_halves,
    store_transposed,
    store_with_one,
    words,
)


@triton.jit
def quantize_vectors(
    x_ptr,
    row_ptr,
    row_scale_inv_ptr,
    M,
    N,
    TOP: tl.constexpr,
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    EDGE: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Tiles of 1 x EDGE, the rowwise usage alone.

    A program takes every so many-th (EDGE, EDGE) tile, and reads STAGES - 1 of them ahead.
    """
    tiles = tl.cdiv(M, EDGE) * tl.cdiv(N, EDGE)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row, col = place(index, M, N, EDGE, EDGE)
        even, odd = load_finite_halves(x_ptr, row, col, M, N, EDGE, EDGE, WHOLE, "evict_first")
        store_rows(
            row_ptr, row_scale_inv_ptr, even, odd, row, col, M, N, TOP, CODES, POWER_OF_2, EDGE, EDGE, WHOLE
        )


@triton.jit
def quantize_crossing_vectors(
    x_ptr,
    row_ptr,
    row_scale_inv_ptr,
    col_ptr,
    col_scale_inv_ptr,
    M,
    N,
    TOP: tl.constexpr,
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    EDGE: tl.constexpr,
    PART: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Tiles of 1 x EDGE of the columnwise usage, and of the rowwise one unless its pointer is None.

    One program an (EDGE, EDGE) tile, PART rows at a time: once for the codes of the rows and the amaxes of the columns,
    and, of what L1 kept, once more for the codes of the columns. All at once take twice the registers.
    """
    row, col = place(tl.program_id(0), M, N, EDGE, EDGE)
    largest = tl.zeros((PART // 2, EDGE), tl.float32)
    for part in range(EDGE // PART):
        first = row + part * PART
        even, odd = load_finite_halves(x_ptr, first, col, M, N, PART, EDGE, WHOLE, "evict_last")
        largest = tl.maximum(largest, larger_magnitude(even, odd))
        if row_ptr is not None:
            store_rows(
                row_ptr,
                row_scale_inv_ptr,
                even,
                odd,
                first,
                col,
                M,
                N,
                TOP,
                CODES,
                POWER_OF_2,
                PART,
                EDGE,
                WHOLE,
            )
    scale = scale_from_amax(tl.max(largest, 0), TOP, POWER_OF_2)
    for part in range(EDGE // PART):
        first = row + part * PART
        even, odd = load_finite_halves(x_ptr, first, col, M, N, PART, EDGE, WHOLE, "evict_first")
        made = words(scaled(even, scale[None, :], TOP, False), scaled(odd, scale[None, :], TOP, False), CODES)
        store_transposed(col_ptr, made, first, col, M, N, PART, EDGE, WHOLE)
    line = col + tl.arange(0, EDGE)
    scales = col_scale_inv_ptr + (row // EDGE).to(tl.int64) * N + line
    tl.store(scales, inverse(scale, POWER_OF_2), mask=line < N)


@triton.jit
def store_rows(
    row_ptr,
    row_scale_inv_ptr,
    even,
    odd,
    row,
    col,
    M,
    N,
    TOP: tl.constexpr,
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    ROWS: tl.constexpr,
    EDGE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Cast a tile's halves with a scale a row and store them; scales are (tiles, M): a tile's lie side by side."""
    even_scale = scale_from_amax(tl.max(tl.abs(even), 1), TOP, POWER_OF_2)
    odd_scale = scale_from_amax(tl.max(tl.abs(odd), 1), TOP, POWER_OF_2)
    even_codes = codes(scaled(even, even_scale[:, None], TOP, False), CODES)
    odd_codes = codes(scaled(odd, odd_scale[:, None], TOP, False), CODES)
    store_halves(row_ptr, even_codes, odd_codes, row, col, M, N, ROWS, EDGE, WHOLE)
    scale_inv = tl.join(inverse(even_scale, POWER_OF_2), inverse(odd_scale, POWER_OF_2))
    line = row + tl.arange(0, ROWS)
    scales = row_scale_inv_ptr + (col // EDGE).to(tl.int64) * M + line
    tl.store(scales, tl.reshape(scale_inv, (ROWS,)), mask=line < M)


@triton.jit
def quantize_squares(
    x_ptr,
    row_ptr,
    row_scale_inv_ptr,
    col_ptr,
    col_scale_inv_ptr,
    M,
    N,
    TOP: tl.constexpr,
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    EDGE: tl.constexpr,
    PART: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Tiles of EDGE x EDGE, one cast for both usages, either of them left out where its pointer is None.

    One program a tile. A tile that is larger than (PART, PART) does not fit into registers: it is read in parts for
    its amax, kept in L2, and read in parts again, last one first, to be cast.
    """
    row, col = place(tl.program_id(0), M, N, EDGE, EDGE)
    PARTS: tl.constexpr = EDGE // PART
    if PARTS == 1:
        even, odd = load_finite_halves(x_ptr, row, col, M, N, PART, PART, WHOLE, "evict_first")
        amax = tl.max(larger_magnitude(even, odd))
        scale = scale_from_amax(amax, TOP, POWER_OF_2)
        store_with_one(
            row_ptr, col_ptr, even, odd, scale, row, col, M, N, TOP, CODES, PART, PART, False, WHOLE
        )
    else:
        largest = tl.zeros((PART // 2, PART), tl.float32)
        for part in range(PARTS * PARTS):
            part_row, part_col = row + part // PARTS * PART, col + part % PARTS * PART
            even, odd = load_finite_halves(x_ptr, part_row, part_col, M, N, PART, PART, WHOLE, "evict_last")
            largest = tl.maximum(largest, larger_magnitude(even, odd))
        scale = scale_from_amax(tl.max(largest), TOP, POWER_OF_2)
        for done in range(PARTS * PARTS):
            part = PARTS * PARTS - 1 - done
            part_row, part_col = row + part // PARTS * PART, col + part % PARTS * PART
            even, odd = load_finite_halves(x_ptr, part_row, part_col, M, N, PART, PART, WHOLE, "evict_first")
            store_with_one(
                row_ptr,
                col_ptr,
                even,
                odd,
                scale,
                part_row,
                part_col,
                M,
                N,
                TOP,
                CODES,
                PART,
                PART,
                False,
                WHOLE,
            )
    scale_inv = inverse(scale, POWER_OF_2)
    if row_ptr is not None:
        tl.store(row_scale_inv_ptr + row // EDGE * tl.cdiv(N, EDGE) + col // EDGE, scale_inv)
    if col_ptr is not None:
        tl.store(col_scale_inv_ptr + col // EDGE * tl.cdiv(M, EDGE) + row // EDGE, scale_inv)
