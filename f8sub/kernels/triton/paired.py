"""Layer 1. Kernels that quantize bfloat16 matrices of whole tiles, read as pairs, once.

What they do is bitwise what the kernel does that each one names; that one is also run, PART rows or columns at a time,
over tiles of which an element is not finite or needs the clamp: their amaxes are beyond LARGEST_BITS.
"""

import triton
import triton.language as tl

from f8sub.kernels.triton.blocks import quantize_crossing_vectors
from f8sub.kernels.triton.pairs import (
    LARGEST_BITS,
    codes_of_columns,
    codes_of_rows,
    larger,
    larger_of_each,
    largest,
    left,
    load_pairs,
    magnitudes,
    right,
    store_columns_of_pairs,
    store_rows_of_pairs,
)
from f8sub.kernels.triton.tiles import inverse, place, scale_from_amax


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
    even, odd = load_pairs(x_ptr, row, col, N, EDGE, EDGE)
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
