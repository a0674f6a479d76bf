"""Layer 1. SwiGLU's backward with scales of blocks: see ``dswiglu``."""

import triton
import triton.language as tl

from f8sub.kernels.triton.blocks import store_rows
from f8sub.kernels.triton.dswiglu import load_finite
from f8sub.kernels.triton.tiles import (
    inverse,
    larger_magnitude,
    place,
    scale_from_amax,
    scaled,
    store_transposed,
    store_with_one,
    words,
)


@triton.jit
def store_vectors(
    row_ptr,
    row_scale_inv_ptr,
    col_ptr,
    col_scale_inv_ptr,
    even,
    odd,
    row,
    col,
    M,
    N,
    TOP: tl.constexpr,
    CODES: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    EDGE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Scales and codes of a tile's halves, by its rows and by its columns, each unless its pointer is None."""
    if row_ptr is not None:
        store_rows(
            row_ptr, row_scale_inv_ptr, even, odd, row, col, M, N, TOP, CODES, POWER_OF_2, EDGE, EDGE, WHOLE
        )
    if col_ptr is not None:
        j = col + tl.arange(0, EDGE)
        scale = scale_from_amax(tl.max(larger_magnitude(even, odd), 0), TOP, POWER_OF_2)
        made = words(scaled(even, scale[None, :], TOP, False), scaled(odd, scale[None, :], TOP, False), CODES)
        store_transposed(col_ptr, made, row, col, M, N, EDGE, EDGE, WHOLE)
        scales = col_scale_inv_ptr + (row // EDGE).to(tl.int64) * N + j
        tl.store(scales, inverse(scale, POWER_OF_2), mask=j < N)


@triton.jit
def quantize_dswiglu_vectors(
    dh_ptr,
    gate_ptr,
    up_ptr,
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
    EDGE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Tiles of 1 x EDGE, an (EDGE, EDGE) tile of the matrix a program."""
    row, col = place(tl.program_id(0), M, N, EDGE, EDGE)
    h_even, h_odd, dgate_even, dgate_odd, dup_even, dup_odd = load_finite(
        dh_ptr, gate_ptr, up_ptr, row, col, M, N, EDGE, EDGE, WHOLE
    )
    for part in tl.static_range(2):
        if part == 0:
            even, odd = dgate_even, dgate_odd
            row_ptr, row_scale_inv_ptr = dgate_row_ptr, dgate_row_scale_inv_ptr
            col_ptr, col_scale_inv_ptr = dgate_col_ptr, dgate_col_scale_inv_ptr
        else:
            even, odd = dup_even, dup_odd
            row_ptr, row_scale_inv_ptr = dup_row_ptr, dup_row_scale_inv_ptr
            col_ptr, col_scale_inv_ptr = dup_col_ptr, dup_col_scale_inv_ptr
        store_vectors(
            row_ptr,
            row_scale_inv_ptr,
            col_ptr,
            col_scale_inv_ptr,
            even,
            odd,
            row,
            col,
            M,
            N,
            TOP,
            CODES,
            POWER_OF_2,
            EDGE,
            WHOLE,
        )
    if h_col_ptr is not None:
        store_vectors(
            None,
            None,
            h_col_ptr,
            h_col_scale_inv_ptr,
            h_even,
            h_odd,
            row,
            col,
            M,
            N,
            H_TOP,
            H_CODES,
            H_POWER_OF_2,
            EDGE,
            WHOLE,
        )


@triton.jit
def quantize_dswiglu_squares(
    dh_ptr,
    gate_ptr,
    up_ptr,
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
    EDGE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Tiles of EDGE x EDGE, one program each, in parts of (ROWS, COLS): for the amaxes, and last first to be cast."""
    row, col = place(tl.program_id(0), M, N, EDGE, EDGE)
    IN_A_ROW: tl.constexpr = EDGE // COLS
    PARTS: tl.constexpr = EDGE // ROWS * IN_A_ROW
    h_amax, dgate_amax, dup_amax = 0.0, 0.0, 0.0
    for part in range(PARTS):
        part_row, part_col = row + part // IN_A_ROW * ROWS, col + part % IN_A_ROW * COLS
        h_even, h_odd, dgate_even, dgate_odd, dup_even, dup_odd = load_finite(
            dh_ptr, gate_ptr, up_ptr, part_row, part_col, M, N, ROWS, COLS, WHOLE
        )
        h_amax = tl.maximum(h_amax, tl.max(larger_magnitude(h_even, h_odd)))
        dgate_amax = tl.maximum(dgate_amax, tl.max(larger_magnitude(dgate_even, dgate_odd)))
        dup_amax = tl.maximum(dup_amax, tl.max(larger_magnitude(dup_even, dup_odd)))
    h_scale = scale_from_amax(h_amax, H_TOP, H_POWER_OF_2)
    dgate_scale = scale_from_amax(dgate_amax, TOP, POWER_OF_2)
    dup_scale = scale_from_amax(dup_amax, TOP, POWER_OF_2)
    for done in range(PARTS):
        part = PARTS - 1 - done
        i, j = row + part // IN_A_ROW * ROWS, col + part % IN_A_ROW * COLS
        h_even, h_odd, gate_even, gate_odd, up_even, up_odd = load_finite(
            dh_ptr, gate_ptr, up_ptr, i, j, M, N, ROWS, COLS, WHOLE
        )
        row_ptr, col_ptr, scale = dgate_row_ptr, dgate_col_ptr, dgate_scale
        store_with_one(
            row_ptr, col_ptr, gate_even, gate_odd, scale, i, j, M, N, TOP, CODES, ROWS, COLS, False, WHOLE
        )
        row_ptr, col_ptr, scale = dup_row_ptr, dup_col_ptr, dup_scale
        store_with_one(
            row_ptr, col_ptr, up_even, up_odd, scale, i, j, M, N, TOP, CODES, ROWS, COLS, False, WHOLE
        )
        if h_col_ptr is not None:
            store_with_one(
                None, h_col_ptr, h_even, h_odd, h_scale, i, j, M, N, H_TOP, H_CODES, ROWS, COLS, False, WHOLE
            )
    at = row // EDGE * tl.cdiv(N, EDGE) + col // EDGE
    at_col = col // EDGE * tl.cdiv(M, EDGE) + row // EDGE
    if dgate_row_ptr is not None:
        tl.store(dgate_row_scale_inv_ptr + at, inverse(dgate_scale, POWER_OF_2))
        tl.store(dup_row_scale_inv_ptr + at, inverse(dup_scale, POWER_OF_2))
    if dgate_col_ptr is not None:
        tl.store(dgate_col_scale_inv_ptr + at_col, inverse(dgate_scale, POWER_OF_2))
        tl.store(dup_col_scale_inv_ptr + at_col, inverse(dup_scale, POWER_OF_2))
    if h_col_ptr is not None:
        tl.store(h_col_scale_inv_ptr + at_col, inverse(h_scale, H_POWER_OF_2))
