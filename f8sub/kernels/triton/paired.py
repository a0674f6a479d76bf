"""Kernels that quantize bfloat16 matrices of whole tiles, read as pairs, and once but for half of 256x256.

What they do is bitwise what the kernel does that each one names.
"""

import triton
import triton.language as tl

from f8sub.kernels.triton.pairs import (
    amax_at,
    codes_of_columns,
    codes_of_rows,
    finite_or_nan_pair,
    high,
    largest_bits,
    last,
    later,
    later_of_each,
    load_pairs,
    low,
    order,
    order_of_tile,
    rows_of_columns,
    store_columns_of_pairs,
    store_rows_of_pairs,
)
from f8sub.kernels.triton.tiles import inverse, place, scale_from_amax, scale_from_prior


@triton.jit
def quantize_paired_vectors(
    x_ptr,
    row_ptr,
    row_scale_inv_ptr,
    col_ptr,
    col_scale_inv_ptr,
    M,
    N,
    TOP: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    EDGE: tl.constexpr,
):
    """``blocks.quantize_crossing_vectors``, each usage unless its pointer is None."""
    row, col = place(tl.program_id(0), M, N, EDGE, EDGE)
    even, odd = load_pairs(x_ptr, row, col, N, EDGE, EDGE, "evict_first")
    even_order, odd_order = order(even), order(odd)
    of_columns = last(later(even_order, odd_order), 0)
    of_rows = last(later_of_each(even_order, odd_order), 1) if row_ptr is not None else 0
    even, odd = finite_or_nan_pair(even), finite_or_nan_pair(odd)
    if row_ptr is not None:
        even_scale = scale_from_amax(amax_at(low(of_rows)), TOP, POWER_OF_2)
        odd_scale = scale_from_amax(amax_at(high(of_rows)), TOP, POWER_OF_2)
        even_codes = codes_of_rows(even, even_scale[:, None], TOP)
        odd_codes = codes_of_rows(odd, odd_scale[:, None], TOP)
        store_rows_of_pairs(row_ptr, even_codes, odd_codes, row, col, N, EDGE, EDGE, True)
        scales = row_scale_inv_ptr + (col // EDGE).to(tl.int64) * M + row
        store_inverses(scales, even_scale, odd_scale, POWER_OF_2, EDGE)
    if col_ptr is not None:
        left_scale = scale_from_amax(amax_at(low(of_columns)), TOP, POWER_OF_2)
        right_scale = scale_from_amax(amax_at(high(of_columns)), TOP, POWER_OF_2)
        words = codes_of_columns(even, odd, left_scale[None, :], right_scale[None, :], TOP)
        store_columns_of_pairs(col_ptr, words, row, col, M, EDGE, EDGE)
        scales = col_scale_inv_ptr + (row // EDGE).to(tl.int64) * N + col
        store_inverses(scales, left_scale, right_scale, POWER_OF_2, EDGE)


@triton.jit
def store_inverses(scale_inv_ptr, first, second, POWER_OF_2: tl.constexpr, EDGE: tl.constexpr):
    """Of scales of EDGE lines, every second one in ``first``."""
    scale_inv = tl.join(inverse(first, POWER_OF_2), inverse(second, POWER_OF_2))
    tl.store(scale_inv_ptr + tl.arange(0, EDGE), tl.reshape(scale_inv, (EDGE,)))


@triton.jit
def store_pairs_with_one(
    row_ptr,
    col_ptr,
    even,
    odd,
    scale,
    row,
    col,
    M,
    N,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Cast a tile with one scale and store it for columns, and for rows unless ``row_ptr`` is None."""
    words = codes_of_columns(finite_or_nan_pair(even), finite_or_nan_pair(odd), scale, scale, TOP)
    if row_ptr is not None:
        even_codes, odd_codes = rows_of_columns(words)
        store_rows_of_pairs(row_ptr, even_codes, odd_codes, row, col, N, ROWS, COLS, False)
    store_columns_of_pairs(col_ptr, words, row, col, M, ROWS, COLS)


@triton.jit
def quantize_paired_squares(
    x_ptr,
    row_ptr,
    row_scale_inv_ptr,
    col_ptr,
    col_scale_inv_ptr,
    M,
    N,
    TOP: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    EDGE: tl.constexpr,
    COLS: tl.constexpr,
):
    """``blocks.quantize_squares`` of the columnwise usage, and of the rowwise one unless its pointer is None.

    The last COLS columns of a tile stay in registers, those before them are read once more to be cast: of a program
    that holds a large tile whole an SM has one, and nothing to do while that one loads.
    """
    row, col = place(tl.program_id(0), M, N, EDGE, EDGE)
    half = 0
    for start in range(0, EDGE - COLS, COLS):
        even, odd = load_pairs(x_ptr, row, col + start, N, EDGE, COLS, "evict_last")
        half = tl.maximum(half, order_of_tile(even, odd))
    end = col + EDGE - COLS
    even, odd = load_pairs(x_ptr, row, end, N, EDGE, COLS, "evict_first")
    half = tl.maximum(half, order_of_tile(even, odd))
    scale = scale_from_amax(amax_at(half), TOP, POWER_OF_2)
    store_pairs_with_one(row_ptr, col_ptr, even, odd, scale, row, end, M, N, TOP, EDGE, COLS)
    for start in range(0, EDGE - COLS, COLS):
        even, odd = load_pairs(x_ptr, row, col + start, N, EDGE, COLS, "evict_first")
        store_pairs_with_one(row_ptr, col_ptr, even, odd, scale, row, col + start, M, N, TOP, EDGE, COLS)
    scale_inv = inverse(scale, POWER_OF_2)
    if row_ptr is not None:
        tl.store(row_scale_inv_ptr + row // EDGE * tl.cdiv(N, EDGE) + col // EDGE, scale_inv)
    tl.store(col_scale_inv_ptr + col // EDGE * tl.cdiv(M, EDGE) + row // EDGE, scale_inv)


@triton.jit
def cast_pairs_with_prior(
    x_ptr,
    amax_ptr,
    prior_ptr,
    largest_ptr,
    row_ptr,
    row_scale_inv_ptr,
    col_ptr,
    col_scale_inv_ptr,
    M,
    N,
    TOP: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    HEADROOM: tl.constexpr,
    COVERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """``casts.cast_with_one`` with a prior scale, for columns, and for rows unless their pointer is None."""
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    row, col = place(index, M, N, ROWS, COLS)
    scale = tl.load(prior_ptr)
    if amax_ptr is not None:
        scale = scale_from_prior(scale, tl.load(amax_ptr), TOP, POWER_OF_2, HEADROOM, COVERS)
    even, odd = load_pairs(x_ptr, row, col, N, ROWS, COLS, "evict_first")
    tl.atomic_max(largest_ptr, largest_bits(even, odd) << 16, sem="relaxed")
    store_pairs_with_one(row_ptr, col_ptr, even, odd, scale, row, col, M, N, TOP, ROWS, COLS)
    scale_inv = inverse(scale, False)
    if row_ptr is not None:
        tl.store(row_scale_inv_ptr, scale_inv, mask=index == 0)
    tl.store(col_scale_inv_ptr, scale_inv, mask=index == 0)
