"""Layer 1. Kernels for scales of whole matrices, rows and columns: amaxes first, then the codes of both usages.

An amax is kept as the bits of a float32 that is not negative: these order as integers do, for which there is an atomic
maximum, and those of NaN come last, after infinity's.
"""

import triton
import triton.language as tl

from f8sub.kernels.triton.tiles import (
    EXPONENT_BITS,
    MAGNITUDE_BITS,
    amax_bits,
    codes,
    finite_or_nan,
    inverse,
    larger_magnitude,
    load_halves,
    place,
    scale_from_amax,
    store_halves,
    store_transposed,
)


@triton.jit
def amax_of_matrix(x_ptr, amax_ptr, largest_ptr, SIZE, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Maxima with what is there: ``amax``, of finite elements, and unless None ``largest``, of all."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    if WHOLE:
        x = tl.load(x_ptr + start + offsets)
    else:
        x = tl.load(x_ptr + start + offsets, mask=offsets < SIZE - start, other=0.0)
    magnitude = x.to(tl.float32).to(tl.int32, bitcast=True) & MAGNITUDE_BITS
    tl.atomic_max(amax_ptr, tl.max(tl.where(magnitude < EXPONENT_BITS, magnitude, 0)), sem="relaxed")
    if largest_ptr is not None:
        tl.atomic_max(largest_ptr, tl.max(magnitude), sem="relaxed")


@triton.jit
def amax_of_lines(
    x_ptr, row_amax_ptr, col_amax_ptr, M, N, ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr
):
    """Maxima with what is there of finite elements: of each row and of each column, unless None."""
    row, col = place(tl.program_id(0), M, N, ROWS, COLS)
    even, odd = load_halves(x_ptr, row, col, M, N, ROWS, COLS, WHOLE, "")
    i, j = row + 2 * tl.arange(0, ROWS // 2), col + tl.arange(0, COLS)
    if row_amax_ptr is not None:
        even_amax = amax_bits(tl.max(tl.abs(even), 1))
        odd_amax = amax_bits(tl.max(tl.abs(odd), 1))
        tl.atomic_max(row_amax_ptr + i, even_amax, mask=i < M, sem="relaxed")
        tl.atomic_max(row_amax_ptr + i + 1, odd_amax, mask=i + 1 < M, sem="relaxed")
    if col_amax_ptr is not None:
        amax = amax_bits(tl.max(larger_magnitude(even, odd), 0))
        tl.atomic_max(col_amax_ptr + j, amax, mask=j < N, sem="relaxed")


@triton.jit
def cast_with_one(
    x_ptr,
    known_ptr,
    row_ptr,
    row_scale_inv_ptr,
    col_ptr,
    col_scale_inv_ptr,
    M,
    N,
    TOP: tl.constexpr,
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    FROM_AMAX: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Codes with one scale, for each usage whose pointer is not None, and the scale's inverse.

    ``known_ptr`` points to the amax where FROM_AMAX, else to the scale. Tiles are taken last one first: what an amax
    was made of last is still in L2.
    """
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    row, col = place(index, M, N, ROWS, COLS)
    scale = tl.load(known_ptr)
    if FROM_AMAX:
        scale = scale_from_amax(scale, TOP, POWER_OF_2)
    even, odd = load_halves(x_ptr, row, col, M, N, ROWS, COLS, WHOLE, "evict_first")
    even_codes = codes(even, scale, TOP, CODES, not FROM_AMAX)
    odd_codes = codes(odd, scale, TOP, CODES, not FROM_AMAX)
    # A scale that is known need not keep to the format's rule.
    scale_inv = inverse(scale, POWER_OF_2 and FROM_AMAX)
    if row_ptr is not None:
        store_halves(row_ptr, even_codes, odd_codes, row, col, M, N, ROWS, COLS, WHOLE)
        tl.store(row_scale_inv_ptr, scale_inv, mask=index == 0)
    if col_ptr is not None:
        store_transposed(col_ptr, even_codes, odd_codes, row, col, M, N, ROWS, COLS, WHOLE)
        tl.store(col_scale_inv_ptr, scale_inv, mask=index == 0)


@triton.jit
def cast_with_lines(
    x_ptr,
    row_amax_ptr,
    row_ptr,
    row_scale_inv_ptr,
    col_amax_ptr,
    col_ptr,
    col_scale_inv_ptr,
    M,
    N,
    TOP: tl.constexpr,
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Codes of each usage whose pointer is not None, with scales of the amaxes of the rows and of the columns."""
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    row, col = place(index, M, N, ROWS, COLS)
    even, odd = load_halves(x_ptr, row, col, M, N, ROWS, COLS, WHOLE, "evict_first")
    i, j = row + 2 * tl.arange(0, ROWS // 2), col + tl.arange(0, COLS)
    if row_ptr is not None:
        even_amax = tl.load(row_amax_ptr + i, mask=i < M, other=0.0)
        odd_amax = tl.load(row_amax_ptr + i + 1, mask=i + 1 < M, other=0.0)
        even_scale = scale_from_amax(even_amax, TOP, POWER_OF_2)
        odd_scale = scale_from_amax(odd_amax, TOP, POWER_OF_2)
        even_codes = codes(even, even_scale[:, None], TOP, CODES, False)
        odd_codes = codes(odd, odd_scale[:, None], TOP, CODES, False)
        store_halves(row_ptr, even_codes, odd_codes, row, col, M, N, ROWS, COLS, WHOLE)
        first = col == 0
        tl.store(row_scale_inv_ptr + i, inverse(even_scale, POWER_OF_2), mask=first & (i < M))
        tl.store(row_scale_inv_ptr + i + 1, inverse(odd_scale, POWER_OF_2), mask=first & (i + 1 < M))
    if col_ptr is not None:
        scale = scale_from_amax(tl.load(col_amax_ptr + j, mask=j < N, other=0.0), TOP, POWER_OF_2)
        even_codes = codes(even, scale[None, :], TOP, CODES, False)
        odd_codes = codes(odd, scale[None, :], TOP, CODES, False)
        store_transposed(col_ptr, even_codes, odd_codes, row, col, M, N, ROWS, COLS, WHOLE)
        tl.store(col_scale_inv_ptr + j, inverse(scale, POWER_OF_2), mask=(row == 0) & (j < N))


@triton.jit
def quantize_rows(
    x_ptr,
    row_ptr,
    row_scale_inv_ptr,
    M,
    N,
    TOP: tl.constexpr,
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The rowwise usage alone, one scale a row: ROWS rows a program, read for their amax, kept in L2, read again."""
    row = tl.program_id(0) * ROWS
    i, j = row + tl.arange(0, ROWS), tl.arange(0, COLS)
    offsets = i.to(tl.int64)[:, None] * N + j[None, :]
    steps = tl.cdiv(N, COLS)
    largest = tl.zeros((ROWS, COLS), tl.float32)
    for step in range(steps):
        if WHOLE:
            x = tl.load(x_ptr + offsets + step * COLS, eviction_policy="evict_last")
        else:
            inside = (i < M)[:, None] & (step * COLS + j < N)[None, :]
            x = tl.load(x_ptr + offsets + step * COLS, mask=inside, other=0.0, eviction_policy="evict_last")
        largest = tl.maximum(largest, tl.abs(finite_or_nan(x.to(tl.float32))))
    scale = scale_from_amax(tl.max(largest, 1), TOP, POWER_OF_2)
    tl.store(row_scale_inv_ptr + i, inverse(scale, POWER_OF_2), mask=i < M)
    for done in range(steps):
        start = (steps - 1 - done) * COLS
        if WHOLE:
            x = tl.load(x_ptr + offsets + start, eviction_policy="evict_first").to(tl.float32)
            made = codes(finite_or_nan(x), scale[:, None], TOP, CODES, False)
            tl.store(row_ptr + offsets + start, made)
        else:
            inside = (i < M)[:, None] & (start + j < N)[None, :]
            x = tl.load(x_ptr + offsets + start, mask=inside, other=0.0, eviction_policy="evict_first")
            made = codes(finite_or_nan(x.to(tl.float32)), scale[:, None], TOP, CODES, False)
            tl.store(row_ptr + offsets + start, made, mask=inside)


@triton.jit
def transpose_codes(codes_ptr, out_ptr, M, N, ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr):
    """(M, N) bytes to (N, M), both even, so that both pointers are to words of 16 bits.

    Two rows by two columns are two words; what is transposed are words.
    """
    row, col = place(tl.program_id(0), M, N, ROWS, COLS)
    i, j = tl.arange(0, ROWS // 2), tl.arange(0, COLS // 2)
    source = codes_ptr + row.to(tl.int64) * (N // 2) + col // 2 + (2 * i)[:, None] * (N // 2) + j[None, :]
    target = out_ptr + col.to(tl.int64) * (M // 2) + row // 2 + (2 * j)[:, None] * (M // 2) + i[None, :]
    if WHOLE:
        even, odd = tl.load(source), tl.load(source + N // 2)
    else:
        inside = (row // 2 + i < M // 2)[:, None] & (col // 2 + j < N // 2)[None, :]
        even, odd = tl.load(source, mask=inside, other=0), tl.load(source + N // 2, mask=inside, other=0)
    first = tl.trans((even & 0xFF) | (odd << 8))
    second = tl.trans((even >> 8) | (odd & 0xFF00))
    if WHOLE:
        tl.store(target, first)
        tl.store(target + M // 2, second)
    else:
        inside = (col // 2 + j < N // 2)[:, None] & (row // 2 + i < M // 2)[None, :]
        tl.store(target, first, mask=inside)
        tl.store(target + M // 2, second, mask=inside)
