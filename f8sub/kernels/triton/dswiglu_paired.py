"""Layer 1. SwiGLU's backward over bfloat16 matrices of whole tiles, read as pairs: see ``dswiglu``.

Where torch multiplies in bfloat16 both elements of a pair are multiplied at once.
"""

import triton
import triton.language as tl

from f8sub.kernels.triton.paired import store_vectors
from f8sub.kernels.triton.pairs import (
    ORDER_OF_ZEROS,
    amax_at,
    high,
    last,
    later,
    later_of_each,
    left,
    load_pairs,
    low,
    order,
    product,
    right,
    rounded_pair,
)
from f8sub.kernels.triton.swiglu import silu_and_sigmoid
from f8sub.kernels.triton.tiles import place


@triton.jit
def swiglu_and_gradients(dh, gate, up):
    """``swiglu.swiglu_and_gradients`` of pairs."""
    left_gate, right_gate = left(gate), right(gate)
    left_silu, left_sigmoid = silu_and_sigmoid(left_gate)
    right_silu, right_sigmoid = silu_and_sigmoid(right_gate)
    silu, dsilu = rounded_pair(left_silu, right_silu), product(dh, up)
    left_dgate = left(dsilu) * left_sigmoid * tl.fma(left_gate, 1.0 - left_sigmoid, 1.0)
    right_dgate = right(dsilu) * right_sigmoid * tl.fma(right_gate, 1.0 - right_sigmoid, 1.0)
    return product(silu, up), rounded_pair(left_dgate, right_dgate), product(dh, silu)


@triton.jit
def load_made_pairs(
    dh_ptr, gate_ptr, up_ptr, row, col, N, ROWS: tl.constexpr, COLS: tl.constexpr, KEEP: tl.constexpr
):
    """h, dgate and dup of a (ROWS, COLS) tile: even and odd rows of each."""
    dh_even, dh_odd = load_pairs(dh_ptr, row, col, N, ROWS, COLS, KEEP)
    gate_even, gate_odd = load_pairs(gate_ptr, row, col, N, ROWS, COLS, KEEP)
    up_even, up_odd = load_pairs(up_ptr, row, col, N, ROWS, COLS, KEEP)
    h_even, dgate_even, dup_even = swiglu_and_gradients(dh_even, gate_even, up_even)
    h_odd, dgate_odd, dup_odd = swiglu_and_gradients(dh_odd, gate_odd, up_odd)
    return h_even, h_odd, dgate_even, dgate_odd, dup_even, dup_odd


@triton.jit
def quantize_paired_dswiglu_vectors(
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
    H_POWER_OF_2: tl.constexpr,
    TOP: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    EDGE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``dswiglu_blocks.quantize_dswiglu_vectors``.

    A program takes every so many-th (EDGE, EDGE) tile; where STAGES is more than 1 the next ones are on their way to
    shared memory meanwhile.
    """
    tiles = (M // EDGE) * (N // EDGE)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row, col = place(index, M, N, EDGE, EDGE)
        h_even, h_odd, dgate_even, dgate_odd, dup_even, dup_odd = load_made_pairs(
            dh_ptr, gate_ptr, up_ptr, row, col, N, EDGE, EDGE, "evict_first"
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
                H_POWER_OF_2,
                EDGE,
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
                POWER_OF_2,
                EDGE,
            )


@triton.jit
def amax_of_paired_dswiglu(
    dh_ptr, gate_ptr, up_ptr, amax_ptr, dgate_past_ptr, dup_past_ptr, BLOCK: tl.constexpr
):
    """``dswiglu.amax_of_dswiglu``, of whole BLOCKs."""
    needed = dgate_past_ptr is None
    if dgate_past_ptr is not None:
        needed = (tl.load(dgate_past_ptr) == 0.0) | (tl.load(dup_past_ptr) == 0.0)
    if needed:
        at = tl.program_id(0).to(tl.int64) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        dh = tl.load(dh_ptr.to(tl.pointer_type(tl.int32)) + at)
        gate = tl.load(gate_ptr.to(tl.pointer_type(tl.int32)) + at)
        up = tl.load(up_ptr.to(tl.pointer_type(tl.int32)) + at)
        _, dgate, dup = swiglu_and_gradients(dh, gate, up)
        keep_amax_of_pairs(amax_ptr, dgate)
        keep_amax_of_pairs(amax_ptr + 1, dup)


@triton.jit
def amax_of_paired_dswiglu_lines(
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
):
    """``dswiglu.amax_of_dswiglu_lines``, of whole tiles of (ROWS, COLS)."""
    first, col = place(tl.program_id(0), M, N, ROWS * STEPS, COLS)
    h_last = tl.full((ROWS // 2, COLS // 2), ORDER_OF_ZEROS, tl.int32)
    dgate_last, dup_last = h_last, h_last
    for step in range(tl.minimum(STEPS, (M - first) // ROWS)):
        row = first + step * ROWS
        h_even, h_odd, dgate_even, dgate_odd, dup_even, dup_odd = load_made_pairs(
            dh_ptr, gate_ptr, up_ptr, row, col, N, ROWS, COLS, ""
        )
        h_last = later(h_last, later(order(h_even), order(h_odd)))
        dgate_even, dgate_odd = order(dgate_even), order(dgate_odd)
        dup_even, dup_odd = order(dup_even), order(dup_odd)
        if dgate_row_amax_ptr is not None:
            keep_amax_of_row_orders(dgate_row_amax_ptr, dgate_even, dgate_odd, row)
            keep_amax_of_row_orders(dup_row_amax_ptr, dup_even, dup_odd, row)
        dgate_last = later(dgate_last, later(dgate_even, dgate_odd))
        dup_last = later(dup_last, later(dup_even, dup_odd))
    if dgate_col_amax_ptr is not None:
        keep_amax_of_column_orders(dgate_col_amax_ptr, dgate_last, col)
        keep_amax_of_column_orders(dup_col_amax_ptr, dup_last, col)
    if h_col_amax_ptr is not None:
        keep_amax_of_column_orders(h_col_amax_ptr, h_last, col)


@triton.jit
def keep_amax_of_row_orders(amax_ptr, even, odd, row):
    """Maxima with what is there of the rows of a tile, of the ``order`` of its even and odd ones."""
    halves = last(later_of_each(even, odd), 1)
    i = row + 2 * tl.arange(0, even.shape[0])
    keep_amax_at(amax_ptr + i, low(halves))
    keep_amax_at(amax_ptr + i + 1, high(halves))


@triton.jit
def keep_amax_of_column_orders(amax_ptr, orders, col):
    """Maxima with what is there of the columns of ``order``s."""
    halves = last(orders, 0)
    j = col + 2 * tl.arange(0, orders.shape[1])
    keep_amax_at(amax_ptr + j, low(halves))
    keep_amax_at(amax_ptr + j + 1, high(halves))


@triton.jit
def keep_amax_of_pairs(amax_ptr, pairs):
    """Maximum with what is there of finite elements."""
    halves = last(order(pairs), 0)
    keep_amax_at(amax_ptr, tl.maximum(low(halves), high(halves)))


@triton.jit
def keep_amax_at(amax_ptr, half):
    """Maximum with what is there of the amaxes that stand at halves of an ``order``."""
    tl.atomic_max(amax_ptr, amax_at(half).to(tl.int32, bitcast=True), sem="relaxed")
