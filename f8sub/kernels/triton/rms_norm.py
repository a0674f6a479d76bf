"""Layer 1. RMSNorm and its codes: the normalized matrix goes to memory in float8 alone.

Rounded where torch's eager operators round, so that with one and the same rstd the elements are torch's. The sum of
squares is in an order of its own, so that rstd is torch's but for its last bits. What is normalized twice, for an amax
and to be cast, is made of the norm's input both times.
"""

import triton
import triton.language as tl

from f8sub.kernels.triton.blocks import store_rows
from f8sub.kernels.triton.casts import keep_amax_of_columns, keep_amax_of_rows, store_with_lines
from f8sub.kernels.triton.swiglu import rounded
from f8sub.kernels.triton.tiles import (
    amax_bits,
    finite_or_nan,
    inverse,
    larger_magnitude,
    load_halves,
    magnitude_bits,
    place,
    scale_from_amax,
    scale_from_past,
    scaled,
    store_transposed,
    store_with_one,
    words,
)


@triton.jit
def normalized(x, rstd, weight, DTYPE: tl.constexpr, ROUNDS: tl.constexpr):
    """Of float32 elements; ROUNDS says that they are rounded before the weight multiplies them, too."""
    h = x * rstd
    if ROUNDS:
        h = rounded(h, DTYPE)
    return rounded(h * weight, DTYPE)


@triton.jit
def rstd_of(squares, COUNT: tl.constexpr, EPS: tl.constexpr):
    """Of sums of COUNT squares."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, COUNT) + EPS))


@triton.jit
def load_elements(ptr, at, inside, WHOLE: tl.constexpr, KEEP: tl.constexpr):
    """float32, zeros where it is not ``inside``; WHOLE says that all are."""
    if WHOLE:
        return tl.load(ptr + at, eviction_policy=KEEP).to(tl.float32)
    return tl.load(ptr + at, mask=inside, other=0.0, eviction_policy=KEEP).to(tl.float32)


@triton.jit
def measure_normed(
    x_ptr,
    weight_ptr,
    rstd_ptr,
    amax_ptr,
    M,
    N,
    EPS: tl.constexpr,
    COUNT: tl.constexpr,
    ROUNDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Find rstd of ROWS rows, and, unless None, the maximum with what is there of finite normalized elements."""
    row = tl.program_id(0) * ROWS
    i, j = row + tl.arange(0, ROWS), tl.arange(0, COLS)
    start = i.to(tl.int64)[:, None] * N
    parts = tl.cdiv(N, COLS)
    squares = tl.zeros((ROWS, COLS), tl.float32)
    for part in range(parts):
        at = part * COLS + j
        inside = (i < M)[:, None] & (at < N)[None, :]
        x = load_elements(x_ptr, start + at[None, :], inside, WHOLE, "evict_last")
        squares += x * x
    rstd = rstd_of(tl.sum(squares, 1), COUNT, EPS)
    tl.store(rstd_ptr + i, rstd, mask=i < M)
    if amax_ptr is not None:
        largest = tl.zeros((ROWS, COLS), tl.float32)
        for done in range(parts):
            at = (parts - 1 - done) * COLS + j
            inside = (i < M)[:, None] & (at < N)[None, :]
            x = load_elements(x_ptr, start + at[None, :], inside, WHOLE, "evict_first")
            weight = load_elements(weight_ptr, at, at < N, WHOLE, "evict_last")
            h = normalized(x, rstd[:, None], weight[None, :], x_ptr.dtype.element_ty, ROUNDS)
            largest = tl.maximum(largest, tl.abs(finite_or_nan(h)))
        tl.atomic_max(amax_ptr, amax_bits(tl.max(largest)), sem="relaxed")


@triton.jit
def load_normed_halves(
    x_ptr,
    weight_ptr,
    rstd_ptr,
    row,
    col,
    M,
    N,
    ROUNDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Even and odd rows of the (ROWS, COLS) tile at (row, col), normalized, as ``load_halves`` has those of x."""
    i, j = row + 2 * tl.arange(0, ROWS // 2), col + tl.arange(0, COLS)
    even, odd = load_halves(x_ptr, row, col, M, N, ROWS, COLS, WHOLE, KEEP)
    weight = load_elements(weight_ptr, j, j < N, WHOLE, "evict_last")[None, :]
    even_rstd = load_elements(rstd_ptr, i, i < M, WHOLE, "evict_last")[:, None]
    odd_rstd = load_elements(rstd_ptr, i + 1, i + 1 < M, WHOLE, "evict_last")[:, None]
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    return normalized(even, even_rstd, weight, DTYPE, ROUNDS), normalized(
        odd, odd_rstd, weight, DTYPE, ROUNDS
    )


@triton.jit
def amax_of_normed_lines(
    x_ptr,
    weight_ptr,
    rstd_ptr,
    row_amax_ptr,
    col_amax_ptr,
    M,
    N,
    ROUNDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """``casts.amax_of_lines`` of what is normalized."""
    first, col = place(tl.program_id(0), M, N, ROWS * STEPS, COLS)
    largest = tl.zeros((ROWS // 2, COLS), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        row = first + step * ROWS
        even, odd = load_normed_halves(
            x_ptr, weight_ptr, rstd_ptr, row, col, M, N, ROUNDS, ROWS, COLS, WHOLE, ""
        )
        even, odd = finite_or_nan(even), finite_or_nan(odd)
        if row_amax_ptr is not None:
            keep_amax_of_rows(row_amax_ptr, even, odd, row, M, ROWS)
        if col_amax_ptr is not None:
            largest = tl.maximum(largest, larger_magnitude(even, odd))
    if col_amax_ptr is not None:
        keep_amax_of_columns(col_amax_ptr, largest, col, N, COLS)


@triton.jit
def cast_normed_with_one(
    x_ptr,
    weight_ptr,
    rstd_ptr,
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
    ROUNDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """``casts.cast_with_one`` of what is normalized."""
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    row, col = place(index, M, N, ROWS, COLS)
    even, odd = load_normed_halves(
        x_ptr, weight_ptr, rstd_ptr, row, col, M, N, ROUNDS, ROWS, COLS, WHOLE, "evict_first"
    )
    if past_ptr is None:
        scale = scale_from_amax(tl.load(amax_ptr), TOP, POWER_OF_2)
    else:
        scale = tl.load(past_ptr)
        if amax_ptr is not None:
            scale = scale_from_past(scale, tl.load(amax_ptr), TOP, POWER_OF_2, HEADROOM, False)
        bits = tl.maximum(magnitude_bits(even), magnitude_bits(odd))
        tl.atomic_max(largest_ptr, tl.max(bits), sem="relaxed")
    even, odd = finite_or_nan(even), finite_or_nan(odd)
    SATURATE: tl.constexpr = past_ptr is not None
    store_with_one(
        row_ptr, col_ptr, even, odd, scale, row, col, M, N, TOP, CODES, ROWS, COLS, SATURATE, WHOLE
    )
    scale_inv = inverse(scale, POWER_OF_2 and past_ptr is None)
    if row_ptr is not None:
        tl.store(row_scale_inv_ptr, scale_inv, mask=index == 0)
    if col_ptr is not None:
        tl.store(col_scale_inv_ptr, scale_inv, mask=index == 0)


@triton.jit
def cast_normed_with_lines(
    x_ptr,
    weight_ptr,
    rstd_ptr,
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
    ROUNDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """``casts.cast_with_lines`` of what is normalized."""
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    row, col = place(index, M, N, ROWS, COLS)
    even, odd = load_normed_halves(
        x_ptr, weight_ptr, rstd_ptr, row, col, M, N, ROUNDS, ROWS, COLS, WHOLE, "evict_first"
    )
    store_with_lines(
        row_amax_ptr,
        row_ptr,
        row_scale_inv_ptr,
        col_amax_ptr,
        col_ptr,
        col_scale_inv_ptr,
        finite_or_nan(even),
        finite_or_nan(odd),
        row,
        col,
        M,
        N,
        TOP,
        CODES,
        POWER_OF_2,
        ROWS,
        COLS,
        WHOLE,
    )


@triton.jit
def quantize_normed_vectors(
    x_ptr,
    weight_ptr,
    rstd_ptr,
    row_ptr,
    row_scale_inv_ptr,
    col_ptr,
    col_scale_inv_ptr,
    M,
    N,
    TOP: tl.constexpr,
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    ROUNDS: tl.constexpr,
    EDGE: tl.constexpr,
    PART: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Tiles of 1 x EDGE, each usage unless its pointer is None, as ``blocks.quantize_crossing_vectors`` has them."""
    row, col = place(tl.program_id(0), M, N, EDGE, EDGE)
    largest = tl.zeros((PART // 2, EDGE), tl.float32)
    for part in range(EDGE // PART):
        first = row + part * PART
        even, odd = load_normed_halves(
            x_ptr, weight_ptr, rstd_ptr, first, col, M, N, ROUNDS, PART, EDGE, WHOLE, "evict_last"
        )
        even, odd = finite_or_nan(even), finite_or_nan(odd)
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
    if col_ptr is not None:
        scale = scale_from_amax(tl.max(largest, 0), TOP, POWER_OF_2)
        for part in range(EDGE // PART):
            first = row + part * PART
            even, odd = load_normed_halves(
                x_ptr, weight_ptr, rstd_ptr, first, col, M, N, ROUNDS, PART, EDGE, WHOLE, "evict_first"
            )
            even = scaled(finite_or_nan(even), scale[None, :], TOP, False)
            odd = scaled(finite_or_nan(odd), scale[None, :], TOP, False)
            store_transposed(col_ptr, words(even, odd, CODES), first, col, M, N, PART, EDGE, WHOLE)
        line = col + tl.arange(0, EDGE)
        scales = col_scale_inv_ptr + (row // EDGE).to(tl.int64) * N + line
        tl.store(scales, inverse(scale, POWER_OF_2), mask=line < N)


@triton.jit
def quantize_normed_squares(
    x_ptr,
    weight_ptr,
    rstd_ptr,
    row_ptr,
    row_scale_inv_ptr,
    col_ptr,
    col_scale_inv_ptr,
    M,
    N,
    TOP: tl.constexpr,
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    ROUNDS: tl.constexpr,
    EDGE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Tiles of EDGE x EDGE, one program each, in parts of (ROWS, COLS): for the amax, and last one first to be cast."""
    row, col = place(tl.program_id(0), M, N, EDGE, EDGE)
    IN_A_ROW: tl.constexpr = EDGE // COLS
    PARTS: tl.constexpr = EDGE // ROWS * IN_A_ROW
    largest = tl.zeros((ROWS // 2, COLS), tl.float32)
    for part in range(PARTS):
        part_row, part_col = row + part // IN_A_ROW * ROWS, col + part % IN_A_ROW * COLS
        even, odd = load_normed_halves(
            x_ptr, weight_ptr, rstd_ptr, part_row, part_col, M, N, ROUNDS, ROWS, COLS, WHOLE, "evict_last"
        )
        largest = tl.maximum(largest, larger_magnitude(finite_or_nan(even), finite_or_nan(odd)))
    scale = scale_from_amax(tl.max(largest), TOP, POWER_OF_2)
    for done in range(PARTS):
        part = PARTS - 1 - done
        part_row, part_col = row + part // IN_A_ROW * ROWS, col + part % IN_A_ROW * COLS
        even, odd = load_normed_halves(
            x_ptr, weight_ptr, rstd_ptr, part_row, part_col, M, N, ROUNDS, ROWS, COLS, WHOLE, "evict_first"
        )
        store_with_one(
            row_ptr,
            col_ptr,
            finite_or_nan(even),
            finite_or_nan(odd),
            scale,
            part_row,
            part_col,
            M,
            N,
            TOP,
            CODES,
            ROWS,
            COLS,
            False,
            WHOLE,
        )
    scale_inv = inverse(scale, POWER_OF_2)
    if row_ptr is not None:
        tl.store(row_scale_inv_ptr + row // EDGE * tl.cdiv(N, EDGE) + col // EDGE, scale_inv)
    if col_ptr is not None:
        tl.store(col_scale_inv_ptr + col // EDGE * tl.cdiv(M, EDGE) + row // EDGE, scale_inv)
