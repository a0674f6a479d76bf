"""Layer 1. SwiGLU's backward: codes of the gradients of gate and up for both usages, and h's by columns, in one pass.

Of dh, gate and up; none of the three results goes to memory in high precision. h's rows were cast in forward; with one
scale a matrix its columns get the same one.
"""

import triton
import triton.language as tl

from f8sub.kernels.triton.casts import keep_amax_of_columns, keep_amax_of_rows, store_with_lines
from f8sub.kernels.triton.swiglu import keep_amax, swiglu_and_gradients
from f8sub.kernels.triton.tiles import (
    finite_or_nan,
    inverse,
    larger_magnitude,
    load_halves,
    magnitude_bits,
    place,
    scale_from_amax,
    scale_from_past,
    store_with_one,
)


@triton.jit
def load_made(
    dh_ptr, gate_ptr, up_ptr, row, col, M, N, ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr
):
    """h, dgate and dup of a tile: even and odd rows of each."""
    dh_even, dh_odd = load_halves(dh_ptr, row, col, M, N, ROWS, COLS, WHOLE, "")
    gate_even, gate_odd = load_halves(gate_ptr, row, col, M, N, ROWS, COLS, WHOLE, "")
    up_even, up_odd = load_halves(up_ptr, row, col, M, N, ROWS, COLS, WHOLE, "")
    DTYPE: tl.constexpr = gate_ptr.dtype.element_ty
    h_even, dgate_even, dup_even = swiglu_and_gradients(dh_even, gate_even, up_even, DTYPE)
    h_odd, dgate_odd, dup_odd = swiglu_and_gradients(dh_odd, gate_odd, up_odd, DTYPE)
    return h_even, h_odd, dgate_even, dgate_odd, dup_even, dup_odd


@triton.jit
def load_finite(
    dh_ptr, gate_ptr, up_ptr, row, col, M, N, ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr
):
    """``load_made``, ``finite_or_nan``."""
    h_even, h_odd, dgate_even, dgate_odd, dup_even, dup_odd = load_made(
        dh_ptr, gate_ptr, up_ptr, row, col, M, N, ROWS, COLS, WHOLE
    )
    h_even, h_odd = finite_or_nan(h_even), finite_or_nan(h_odd)
    dgate_even, dgate_odd = finite_or_nan(dgate_even), finite_or_nan(dgate_odd)
    return h_even, h_odd, dgate_even, dgate_odd, finite_or_nan(dup_even), finite_or_nan(dup_odd)


@triton.jit
def load_or_zeros(x_ptr, at, SIZE, WHOLE: tl.constexpr):
    """float32 elements, zeros beyond SIZE."""
    x = tl.load(x_ptr + at) if WHOLE else tl.load(x_ptr + at, mask=at < SIZE, other=0.0)
    return x.to(tl.float32)


@triton.jit
def amax_of_dswiglu(
    dh_ptr,
    gate_ptr,
    up_ptr,
    amax_ptr,
    dgate_past_ptr,
    dup_past_ptr,
    SIZE,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Maxima with what is there, of dgate and of dup; left alone where both pasts are scales that are not 0."""
    needed = dgate_past_ptr is None
    if dgate_past_ptr is not None:
        needed = (tl.load(dgate_past_ptr) == 0.0) | (tl.load(dup_past_ptr) == 0.0)
    if needed:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        dh = load_or_zeros(dh_ptr, at, SIZE, WHOLE)
        gate, up = load_or_zeros(gate_ptr, at, SIZE, WHOLE), load_or_zeros(up_ptr, at, SIZE, WHOLE)
        _, dgate, dup = swiglu_and_gradients(dh, gate, up, gate_ptr.dtype.element_ty)
        keep_amax(amax_ptr, dgate)
        keep_amax(amax_ptr + 1, dup)


@triton.jit
def gradient_scale(amax_ptr, past_ptr, TOP: tl.constexpr, POWER_OF_2: tl.constexpr, HEADROOM: tl.constexpr):
    """Of the amax, or of the past where ``past_ptr`` is not None."""
    amax = tl.load(amax_ptr)
    if past_ptr is None:
        scale = scale_from_amax(amax, TOP, POWER_OF_2)
    else:
        scale = scale_from_past(tl.load(past_ptr), amax, TOP, POWER_OF_2, HEADROOM, False)
    return scale


@triton.jit
def cast_dswiglu_with_one(
    dh_ptr,
    gate_ptr,
    up_ptr,
    amax_ptr,
    dgate_past_ptr,
    dup_past_ptr,
    dgate_largest_ptr,
    dup_largest_ptr,
    scale_ptr,
    dgate_row_ptr,
    dgate_row_scale_inv_ptr,
    dgate_col_ptr,
    dgate_col_scale_inv_ptr,
    dup_row_ptr,
    dup_row_scale_inv_ptr,
    dup_col_ptr,
    dup_col_scale_inv_ptr,
    h_col_ptr,
    h_col_scale_inv_ptr,
    M,
    N,
    H_TOP: tl.constexpr,
    H_CODES: tl.constexpr,
    TOP: tl.constexpr,
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    DGATE_HEADROOM: tl.constexpr,
    DUP_HEADROOM: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Codes with one scale a matrix: of amaxes, or of the past as ``cast_with_one`` has it; h's is known."""
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    row, col = place(index, M, N, ROWS, COLS)
    SATURATE: tl.constexpr = dgate_past_ptr is not None
    dgate_scale = gradient_scale(amax_ptr, dgate_past_ptr, TOP, POWER_OF_2, DGATE_HEADROOM)
    dup_scale = gradient_scale(amax_ptr + 1, dup_past_ptr, TOP, POWER_OF_2, DUP_HEADROOM)
    h_even, h_odd, dgate_even, dgate_odd, dup_even, dup_odd = load_made(
        dh_ptr, gate_ptr, up_ptr, row, col, M, N, ROWS, COLS, WHOLE
    )
    for part in tl.static_range(2):
        if part == 0:
            even, odd, scale = dgate_even, dgate_odd, dgate_scale
            row_ptr, row_scale_inv_ptr = dgate_row_ptr, dgate_row_scale_inv_ptr
            col_ptr, col_scale_inv_ptr = dgate_col_ptr, dgate_col_scale_inv_ptr
        else:
            even, odd, scale = dup_even, dup_odd, dup_scale
            row_ptr, row_scale_inv_ptr = dup_row_ptr, dup_row_scale_inv_ptr
            col_ptr, col_scale_inv_ptr = dup_col_ptr, dup_col_scale_inv_ptr
        if SATURATE:
            bits = tl.maximum(magnitude_bits(even), magnitude_bits(odd))
            tl.atomic_max(dup_largest_ptr if part else dgate_largest_ptr, tl.max(bits), sem="relaxed")
        even, odd = finite_or_nan(even), finite_or_nan(odd)
        store_with_one(
            row_ptr, col_ptr, even, odd, scale, row, col, M, N, TOP, CODES, ROWS, COLS, SATURATE, WHOLE
        )
        scale_inv = inverse(scale, POWER_OF_2 and not SATURATE)
        if row_ptr is not None:
            tl.store(row_scale_inv_ptr, scale_inv, mask=index == 0)
        if col_ptr is not None:
            tl.store(col_scale_inv_ptr, scale_inv, mask=index == 0)
    if h_col_ptr is not None:
        scale = tl.load(scale_ptr)
        even, odd = finite_or_nan(h_even), finite_or_nan(h_odd)
        store_with_one(
            None, h_col_ptr, even, odd, scale, row, col, M, N, H_TOP, H_CODES, ROWS, COLS, True, WHOLE
        )
        tl.store(h_col_scale_inv_ptr, inverse(scale, False), mask=index == 0)


@triton.jit
def amax_of_dswiglu_lines(
    dh_ptr,
    gate_ptr,
    up_ptr,
    dgate_row_amax_ptr,
    dgate_col_amax_ptr,
    dup_row_amax_ptr,
    dup_col_amax_ptr,
    h_col_amax_ptr,
    M,
    N,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEPS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Maxima with what is there, as ``amax_of_lines``: of both gradients and of h's columns."""
    first, col = place(tl.program_id(0), M, N, ROWS * STEPS, COLS)
    h_largest = tl.zeros((ROWS // 2, COLS), tl.float32)
    dgate_largest = tl.zeros((ROWS // 2, COLS), tl.float32)
    dup_largest = tl.zeros((ROWS // 2, COLS), tl.float32)
    for step in range(STEPS):
        row = first + step * ROWS
        h_even, h_odd, dgate_even, dgate_odd, dup_even, dup_odd = load_finite(
            dh_ptr, gate_ptr, up_ptr, row, col, M, N, ROWS, COLS, WHOLE
        )
        if dgate_row_amax_ptr is not None:
            keep_amax_of_rows(dgate_row_amax_ptr, dgate_even, dgate_odd, row, M, ROWS)
            keep_amax_of_rows(dup_row_amax_ptr, dup_even, dup_odd, row, M, ROWS)
        h_largest = tl.maximum(h_largest, larger_magnitude(h_even, h_odd))
        dgate_largest = tl.maximum(dgate_largest, larger_magnitude(dgate_even, dgate_odd))
        dup_largest = tl.maximum(dup_largest, larger_magnitude(dup_even, dup_odd))
    if dgate_col_amax_ptr is not None:
        keep_amax_of_columns(dgate_col_amax_ptr, dgate_largest, col, N, COLS)
        keep_amax_of_columns(dup_col_amax_ptr, dup_largest, col, N, COLS)
    if h_col_amax_ptr is not None:
        keep_amax_of_columns(h_col_amax_ptr, h_largest, col, N, COLS)


@triton.jit
def cast_dswiglu_with_lines(
    dh_ptr,
    gate_ptr,
    up_ptr,
    dgate_row_amax_ptr,
    dgate_col_amax_ptr,
    dup_row_amax_ptr,
    dup_col_amax_ptr,
    h_col_amax_ptr,
    dgate_row_ptr,
    dgate_row_scale_inv_ptr,
    dgate_col_ptr,
    dgate_col_scale_inv_ptr,
    dup_row_ptr,
    dup_row_scale_inv_ptr,
    dup_col_ptr,
    dup_col_scale_inv_ptr,
    h_col_ptr,
    h_col_scale_inv_ptr,
    M,
    N,
    H_TOP: tl.constexpr,
    H_CODES: tl.constexpr,
    H_POWER_OF_2: tl.constexpr,
    TOP: tl.constexpr,
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Codes with scales of the amaxes of rows and of columns."""
    row, col = place(tl.num_programs(0) - 1 - tl.program_id(0), M, N, ROWS, COLS)
    h_even, h_odd, dgate_even, dgate_odd, dup_even, dup_odd = load_finite(
        dh_ptr, gate_ptr, up_ptr, row, col, M, N, ROWS, COLS, WHOLE
    )
    for part in tl.static_range(3):
        if part == 0:
            even, odd = dgate_even, dgate_odd
            row_amax_ptr, row_ptr, row_scale_inv_ptr = (
                dgate_row_amax_ptr,
                dgate_row_ptr,
                dgate_row_scale_inv_ptr,
            )
            col_amax_ptr, col_ptr, col_scale_inv_ptr = (
                dgate_col_amax_ptr,
                dgate_col_ptr,
                dgate_col_scale_inv_ptr,
            )
        elif part == 1:
            even, odd = dup_even, dup_odd
            row_amax_ptr, row_ptr, row_scale_inv_ptr = dup_row_amax_ptr, dup_row_ptr, dup_row_scale_inv_ptr
            col_amax_ptr, col_ptr, col_scale_inv_ptr = dup_col_amax_ptr, dup_col_ptr, dup_col_scale_inv_ptr
        else:
            even, odd = h_even, h_odd
            row_amax_ptr, row_ptr, row_scale_inv_ptr = None, None, None
            col_amax_ptr, col_ptr, col_scale_inv_ptr = h_col_amax_ptr, h_col_ptr, h_col_scale_inv_ptr
        store_with_lines(
            row_amax_ptr,
            row_ptr,
            row_scale_inv_ptr,
            col_amax_ptr,
            col_ptr,
            col_scale_inv_ptr,
            even,
            odd,
            row,
            col,
            M,
            N,
            H_TOP if part == 2 else TOP,
            H_CODES if part == 2 else CODES,
            H_POWER_OF_2 if part == 2 else POWER_OF_2,
            ROWS,
            COLS,
            WHOLE,
        )
