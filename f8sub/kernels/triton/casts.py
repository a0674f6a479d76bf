"""Kernels for scales of whole matrices, rows and columns: amaxes first, then the codes of both usages.

An amax is kept as the bits of a float32 that is not negative: these order as integers do, for which there is an atomic
maximum, and those of NaN come last, after infinity's.
"""

import triton
import triton.language as tl

from f8sub.kernels.triton.tiles import (
    EXPONENT_BITS,
    amax_bits,
    codes,
    finite_or_nan,
    inverse,
    larger_magnitude,
    load_finite_halves,
    load_halves,
    magnitude_bits,
    place,
    scale_from_amax,
    scale_from_prior,
    scaled,
    store_halves,
    store_transposed,
    store_with_one,
    words,
)


@triton.jit
def amax_of_matrix(x_ptr, amax_ptr, prior_ptr, SIZE, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Maximum with what is there of finite elements; left alone where ``prior_ptr`` points to a scale that is not 0."""
    needed = prior_ptr is None
    if prior_ptr is not None:
        needed = tl.load(prior_ptr) == 0.0
    if needed:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        offsets = tl.arange(0, BLOCK)
        if WHOLE:
            x = tl.load(x_ptr + start + offsets)
        else:
            x = tl.load(x_ptr + start + offsets, mask=offsets < SIZE - start, other=0.0)
        bits = magnitude_bits(x.to(tl.float32))
        tl.atomic_max(amax_ptr, tl.max(tl.where(bits < EXPONENT_BITS, bits, 0)), sem="relaxed")


@triton.jit
def amax_of_lines(
    x_ptr,
    row_amax_ptr,
    col_amax_ptr,
    M,
    N,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Maxima with what is there of finite elements: of each row and of each column, unless None.

    A program goes down STEPS tiles of the same columns, whose amaxes it reduces once.
    """
    first, col = place(tl.program_id(0), M, N, ROWS * STEPS, COLS)
    largest = tl.zeros((ROWS // 2, COLS), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        row = first + step * ROWS
        even, odd = load_finite_halves(x_ptr, row, col, M, N, ROWS, COLS, WHOLE, "")
        if row_amax_ptr is not None:
            keep_amax_of_rows(row_amax_ptr, even, odd, row, M, ROWS)
        if col_amax_ptr is not None:
            largest = tl.maximum(largest, larger_magnitude(even, odd))
    if col_amax_ptr is not None:
        keep_amax_of_columns(col_amax_ptr, largest, col, N, COLS)


@triton.jit
def keep_amax_of_rows(amax_ptr, even, odd, row, M, ROWS: tl.constexpr):
    """Maxima with what is there of the rows of a tile's halves."""
    i = row + 2 * tl.arange(0, ROWS // 2)
    tl.atomic_max(amax_ptr + i, amax_bits(tl.max(tl.abs(even), 1)), mask=i < M, sem="relaxed")
    tl.atomic_max(amax_ptr + i + 1, amax_bits(tl.max(tl.abs(odd), 1)), mask=i + 1 < M, sem="relaxed")


@triton.jit
def keep_amax_of_columns(amax_ptr, largest, col, N, COLS: tl.constexpr):
    """Maxima with what is there of the columns of magnitudes."""
    j = col + tl.arange(0, COLS)
    tl.atomic_max(amax_ptr + j, amax_bits(tl.max(largest, 0)), mask=j < N, sem="relaxed")


@triton.jit
def cast_with_one(
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
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    HEADROOM: tl.constexpr,
    COVERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Codes with one scale, for each usage whose pointer is not None, and the scale's inverse.

    The scale is that of the amax, or the prior one where ``prior_ptr`` is not None, which is there where ``amax_ptr``
    is None; then ``largest`` becomes the maximum with what is there of all elements. Tiles are taken last one first:
    what an amax was made of last is still in L2.
    """
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    row, col = place(index, M, N, ROWS, COLS)
    even, odd = load_halves(x_ptr, row, col, M, N, ROWS, COLS, WHOLE, "evict_first")
    if prior_ptr is None:
        scale = scale_from_amax(tl.load(amax_ptr), TOP, POWER_OF_2)
    else:
        scale = tl.load(prior_ptr)
        if amax_ptr is not None:
            scale = scale_from_prior(scale, tl.load(amax_ptr), TOP, POWER_OF_2, HEADROOM, COVERS)
        bits = tl.maximum(magnitude_bits(even), magnitude_bits(odd))
        tl.atomic_max(largest_ptr, tl.max(bits), sem="relaxed")
    even, odd = finite_or_nan(even), finite_or_nan(odd)
    SATURATE: tl.constexpr = prior_ptr is not None
    store_with_one(
        row_ptr, col_ptr, even, odd, scale, row, col, M, N, TOP, CODES, ROWS, COLS, SATURATE, WHOLE
    )
    # A prior scale need not keep to the format's rule.
    scale_inv = inverse(scale, POWER_OF_2 and prior_ptr is None)
    if row_ptr is not None:
        tl.store(row_scale_inv_ptr, scale_inv, mask=index == 0)
    if col_ptr is not None:
        tl.store(col_scale_inv_ptr, scale_inv, mask=index == 0)


@triton.jit
def stage_amax(amax_ptr, staged_ptr, met_ptr):
    """Maximum with what is staged of an amax that is finite; of one that is not, 1 where that is remembered."""
    amax, staged, met = tl.load(amax_ptr), tl.load(staged_ptr), tl.load(met_ptr)
    is_finite = magnitude_bits(amax) < EXPONENT_BITS
    tl.store(staged_ptr, tl.where(is_finite, tl.maximum(staged, amax), staged))
    tl.store(met_ptr, tl.where(is_finite, met, 1.0))


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
    even, odd = load_finite_halves(x_ptr, row, col, M, N, ROWS, COLS, WHOLE, "evict_first")
    i, j = row + 2 * tl.arange(0, ROWS // 2), col + tl.arange(0, COLS)
    if row_ptr is not None:
        even_amax = tl.load(row_amax_ptr + i, mask=i < M, other=0.0)
        odd_amax = tl.load(row_amax_ptr + i + 1, mask=i + 1 < M, other=0.0)
        even_scale = scale_from_amax(even_amax, TOP, POWER_OF_2)
        odd_scale = scale_from_amax(odd_amax, TOP, POWER_OF_2)
        even_codes = codes(scaled(even, even_scale[:, None], TOP, False), CODES)
        odd_codes = codes(scaled(odd, odd_scale[:, None], TOP, False), CODES)
        store_halves(row_ptr, even_codes, odd_codes, row, col, M, N, ROWS, COLS, WHOLE)
        first = col == 0
        tl.store(row_scale_inv_ptr + i, inverse(even_scale, POWER_OF_2), mask=first & (i < M))
        tl.store(row_scale_inv_ptr + i + 1, inverse(odd_scale, POWER_OF_2), mask=first & (i + 1 < M))
    if col_ptr is not None:
        scale = scale_from_amax(tl.load(col_amax_ptr + j, mask=j < N, other=0.0), TOP, POWER_OF_2)
        made = words(scaled(even, scale[None, :], TOP, False), scaled(odd, scale[None, :], TOP, False), CODES)
        store_transposed(col_ptr, made, row, col, M, N, ROWS, COLS, WHOLE)
        tl.store(col_scale_inv_ptr + j, inverse(scale, POWER_OF_2), mask=(row == 0) & (j < N))


@triton.jit
def quantize_rows(
    x_ptr,
    row_ptr,
    row_scale_inv_ptr,
    N,
    TOP: tl.constexpr,
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    PART: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The rowwise usage alone, one scale a row: a row a program, read for its amax, kept in L2, read again."""
    start, j = tl.program_id(0).to(tl.int64) * N, tl.arange(0, PART)
    x_row, made_row = x_ptr + start, row_ptr + start
    parts = tl.cdiv(N, PART)
    largest = tl.zeros((PART,), tl.float32)
    for part in range(parts):
        at = part * PART + j
        if WHOLE:
            x = tl.load(x_row + at, eviction_policy="evict_last")
        else:
            x = tl.load(x_row + at, mask=at < N, other=0.0, eviction_policy="evict_last")
        largest = tl.maximum(largest, tl.abs(finite_or_nan(x.to(tl.float32))))
    scale = scale_from_amax(tl.max(largest), TOP, POWER_OF_2)
    tl.store(row_scale_inv_ptr + tl.program_id(0), inverse(scale, POWER_OF_2))
    for done in range(parts):
        at = (parts - 1 - done) * PART + j
        if WHOLE:
            x = tl.load(x_row + at, eviction_policy="evict_first")
            tl.store(made_row + at, codes(scaled(finite_or_nan(x.to(tl.float32)), scale, TOP, False), CODES))
        else:
            x = tl.load(x_row + at, mask=at < N, other=0.0, eviction_policy="evict_first")
            made = codes(scaled(finite_or_nan(x.to(tl.float32)), scale, TOP, False), CODES)
            tl.store(made_row + at, made, mask=at < N)


@triton.jit
def cast_part(
    x_ptr,
    scale_ptr,
    out_ptr,
    M,
    N,
    OUT_STRIDE,
    SCALE_STRIDE,
    first_row,
    first_col,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    TOP: tl.constexpr,
    CODES: tl.constexpr,
    THROUGH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Codes of a part of a matrix, which begins at (first_row, first_col) of it, with scales that are known.

    Elements are rounded to THROUGH first. A program's columns lie under one scale; TILE_ROWS and TILE_COLS are None
    where tiles are all rows, all columns.
    """
    row, col = place(tl.program_id(0), M, N, ROWS, COLS)
    i, j = row + tl.arange(0, ROWS), col + tl.arange(0, COLS)
    inside = (i < M)[:, None] & (j < N)[None, :]
    pointers = x_ptr + i.to(tl.int64)[:, None] * N + j[None, :]
    x = (
        tl.load(pointers, eviction_policy="evict_first")
        if WHOLE
        else tl.load(pointers, mask=inside, other=0.0)
    )
    scales = scale_ptr
    if TILE_COLS is not None:
        scales += (first_col + col) // TILE_COLS
    if TILE_ROWS is None:
        scale = tl.load(scales)
    else:
        scale = tl.load(scales + ((first_row + i) // TILE_ROWS).to(tl.int64) * SCALE_STRIDE, mask=i < M)[
            :, None
        ]
    made = codes(scaled(finite_or_nan(x.to(THROUGH).to(tl.float32)), scale, TOP, True), CODES)
    out = out_ptr + i.to(tl.int64)[:, None] * OUT_STRIDE + j[None, :]
    if WHOLE:
        tl.store(out, made)
    else:
        tl.store(out, made, mask=inside)


@triton.jit
def transpose_codes(
    codes_ptr,
    scale_inv_ptr,
    out_ptr,
    out_scale_inv_ptr,
    M,
    N,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """(M, N) bytes to (N, M), both even, so that both pointers are to words of 16 bits.

    Two rows by two columns are two words; what is transposed are words. Scales, unless their pointers are None, are of
    squares whose edge, TILE, is a multiple of ROWS and of COLS, or where it is None of the whole matrix.
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
    if scale_inv_ptr is not None:
        if TILE is None:
            tl.store(out_scale_inv_ptr, tl.load(scale_inv_ptr), mask=tl.program_id(0) == 0)
        else:
            # Programs of one square store the same.
            scale_inv = tl.load(scale_inv_ptr + row // TILE * tl.cdiv(N, TILE) + col // TILE)
            tl.store(out_scale_inv_ptr + col // TILE * tl.cdiv(M, TILE) + row // TILE, scale_inv)
