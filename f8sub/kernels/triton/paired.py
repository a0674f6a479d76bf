"""Layer 1. Kernels that quantize bfloat16 matrices of whole tiles, read as pairs, and once but for half of 256x256.

What they do is bitwise what the kernel does that each one names; that one is also run, PART rows or columns at a time,
over tiles of which an element is not finite or needs the clamp: their amaxes are beyond LARGEST_BITS.
"""

import triton
import triton.language as tl

from f8sub.kernels.triton.blocks import quantize_crossing_vectors, quantize_squares
from f8sub.kernels.triton.pairs import (
    LARGEST_BITS,
    amax_of_tile,
    codes_of_columns,
    codes_of_rows,
    larger,
    larger_of_each,
    largest,
    left,
    load_pairs,
    magnitudes,
    right,
    rows_of_columns,
    store_columns_of_pairs,
    store_rows_of_pairs,
)
from f8sub.kernels.triton.tiles import (
    inverse,
    load_finite_halves,
    place,
    scale_from_amax,
    scale_from_past,
    store_with_one,
)


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
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    EDGE: tl.constexpr,
    PART: tl.constexpr,
):
    """``blocks.quantize_crossing_vectors``."""
    row, col = place(tl.program_id(0), M, N, EDGE, EDGE)
    even, odd = load_pairs(x_ptr, row, col, N, EDGE, EDGE, "evict_first")
    amax = largest(larger(magnitudes(even), magnitudes(odd)), 0)
    left_scale = scale_from_amax(left(amax), TOP, POWER_OF_2)
    right_scale = scale_from_amax(right(amax), TOP, POWER_OF_2)
    if row_ptr is not None:
        scales = row_scale_inv_ptr + (col // EDGE).to(tl.int64) * M + row
        store_vectors(row_ptr, scales, even, odd, row, col, N, TOP, POWER_OF_2, EDGE)
    words = codes_of_columns(even, odd, left_scale[None, :], right_scale[None, :], TOP)
    store_columns_of_pairs(col_ptr, words, row, col, M, EDGE, EDGE)
    scales = col_scale_inv_ptr + (row // EDGE).to(tl.int64) * N + col
    store_inverses(scales, left_scale, right_scale, POWER_OF_2, EDGE)
    if tl.max(tl.maximum(amax & 0xFFFF, amax >> 16), 0) > LARGEST_BITS:
        # What other threads of the program have stored is stored again.
        tl.debug_barrier()
        quantize_crossing_vectors(
            x_ptr,
            row_ptr,
            row_scale_inv_ptr,
            col_ptr,
            col_scale_inv_ptr,
            M,
            N,
            TOP,
            CODES,
            POWER_OF_2,
            EDGE,
            PART,
            True,
        )


@triton.jit
def store_vectors(
    row_ptr,
    scales,
    even,
    odd,
    row,
    col,
    N,
    TOP: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Cast an (EDGE, EDGE) tile with a scale a row and store it; ``scales`` is where their inverses go."""
    # Four pairs of a row lie within a thread, and two rows' amaxes are one pair for what lies in others.
    parts: tl.constexpr = (EDGE // 2, EDGE // 8, 4)
    of_even = largest(tl.reshape(magnitudes(even), parts), 2)
    of_odd = largest(tl.reshape(magnitudes(odd), parts), 2)
    amax = largest(larger_of_each(of_even, of_odd), 1)
    even_scale = scale_from_amax(left(amax), TOP, POWER_OF_2)
    odd_scale = scale_from_amax(right(amax), TOP, POWER_OF_2)
    even_codes = codes_of_rows(even, even_scale[:, None], TOP)
    odd_codes = codes_of_rows(odd, odd_scale[:, None], TOP)
    store_rows_of_pairs(row_ptr, even_codes, odd_codes, row, col, N, EDGE, EDGE, True)
    store_inverses(scales, even_scale, odd_scale, POWER_OF_2, EDGE)


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
    words = codes_of_columns(even, odd, scale, scale, TOP)
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
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    EDGE: tl.constexpr,
    COLS: tl.constexpr,
    PART: tl.constexpr,
):
    """``blocks.quantize_squares`` of the columnwise usage, and of the rowwise one unless its pointer is None.

    The last COLS columns of a tile stay in registers, those before them are read once more to be cast: of a program
    that holds a large tile whole an SM has one, and nothing to do while that one loads.
    """
    row, col = place(tl.program_id(0), M, N, EDGE, EDGE)
    bits = 0
    for start in range(0, EDGE - COLS, COLS):
        even, odd = load_pairs(x_ptr, row, col + start, N, EDGE, COLS, "evict_last")
        bits = tl.maximum(bits, amax_of_tile(even, odd))
    even, odd = load_pairs(x_ptr, row, col + EDGE - COLS, N, EDGE, COLS, "evict_first")
    bits = tl.maximum(bits, amax_of_tile(even, odd))
    if bits > LARGEST_BITS:
        quantize_squares(
            x_ptr,
            row_ptr,
            row_scale_inv_ptr,
            col_ptr,
            col_scale_inv_ptr,
            M,
            N,
            TOP,
            CODES,
            POWER_OF_2,
            EDGE,
            PART,
            True,
        )
    else:
        scale = scale_from_amax(left(bits), TOP, POWER_OF_2)
        last = col + EDGE - COLS
        store_pairs_with_one(row_ptr, col_ptr, even, odd, scale, row, last, M, N, TOP, EDGE, COLS)
        for start in range(0, EDGE - COLS, COLS):
            even, odd = load_pairs(x_ptr, row, col + start, N, EDGE, COLS, "evict_first")
            store_pairs_with_one(row_ptr, col_ptr, even, odd, scale, row, col + start, M, N, TOP, EDGE, COLS)
        scale_inv = inverse(scale, POWER_OF_2)
        if row_ptr is not None:
            tl.store(row_scale_inv_ptr + row // EDGE * tl.cdiv(N, EDGE) + col // EDGE, scale_inv)
        tl.store(col_scale_inv_ptr + col // EDGE * tl.cdiv(M, EDGE) + row // EDGE, scale_inv)


@triton.jit
def cast_pairs_with_past(
    x_ptr,
    amax_ptr,
    past_ptr,
    largest_ptr,
    row_ptr,
    row_scale_inv_ptr,
    col_ptr,
    col_scale_inv_ptr,
    M,
    N,
    TOP: tl.constexpr,
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    HEADROOM: tl.constexpr,
    COVERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PART: tl.constexpr,
):
    """``casts.cast_with_one`` of a past, for columns, and for rows unless their pointer is None."""
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    row, col = place(index, M, N, ROWS, COLS)
    scale = tl.load(past_ptr)
    if amax_ptr is not None:
        scale = scale_from_past(scale, tl.load(amax_ptr), TOP, POWER_OF_2, HEADROOM, COVERS)
    even, odd = load_pairs(x_ptr, row, col, N, ROWS, COLS, "evict_first")
    bits = amax_of_tile(even, odd)
    tl.atomic_max(largest_ptr, bits << 16, sem="relaxed")
    if bits > LARGEST_BITS:
        for part in range((ROWS // PART) * (COLS // PART)):
            part_row, part_col = row + part // (COLS // PART) * PART, col + part % (COLS // PART) * PART
            halves = load_finite_halves(x_ptr, part_row, part_col, M, N, PART, PART, True, "")
            store_with_one(
                row_ptr,
                col_ptr,
                halves[0],
                halves[1],
                scale,
                part_row,
                part_col,
                M,
                N,
                TOP,
                CODES,
                PART,
                PART,
                True,
                True,
            )
    else:
        store_pairs_with_one(row_ptr, col_ptr, even, odd, scale, row, col, M, N, TOP, ROWS, COLS)
    scale_inv = inverse(scale, False)
    if row_ptr is not None:
        tl.store(row_scale_inv_ptr, scale_inv, mask=index == 0)
    tl.store(col_scale_inv_ptr, scale_inv, mask=index == 0)
