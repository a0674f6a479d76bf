"""Kernels around cuDNN's attention in float8: scales from amaxes, histories, and float8 back to high precision.

The first three are one small program each, in place of a dozen operators between which a GPU would wait.
"""

import triton
import triton.language as tl


@triton.jit
def forward_scales(q_ptr, k_ptr, v_ptr, out_ptr, HEADROOM, OF_1):
    """Write the scales of a forward, 7 float32: see ``ForwardScales``. q_ptr, k_ptr, v_ptr: inverse scales."""
    # One after another: loads of single numbers are not worth vectors.
    of_v = tl.load(v_ptr)
    tl.store(out_ptr, tl.load(q_ptr))
    tl.store(out_ptr + 1, tl.load(k_ptr))
    tl.store(out_ptr + 2, of_v)
    tl.store(out_ptr + 3, of_v / HEADROOM)
    tl.store(out_ptr + 4, HEADROOM / of_v)
    tl.store(out_ptr + 5, OF_1)
    tl.store(out_ptr + 6, 1.0 / OF_1)


@triton.jit
def backward_scales(
    inverse_ptr, inverse_do_ptr, history_ptr, out_ptr,
    BACKWARDS, OF_DP, TERMS, TOP, MARGIN, OF_1, LARGEST, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the scales of a backward, 10 float32: see ``BackwardScales``; ROWS is a power of 2, BACKWARDS or more."""
    i, column = tl.arange(0, ROWS), tl.arange(0, 4)
    remembered = tl.load(
        history_ptr + i[:, None] * 4 + column[None, :], mask=i[:, None] < BACKWARDS, other=0.0
    )
    remembered = tl.max(remembered, 0) * MARGIN
    amax_q = tl.load(inverse_ptr) * OF_1
    amax_k = tl.load(inverse_ptr + 1) * OF_1
    amax_v = tl.load(inverse_ptr + 2) * OF_1
    amax_do = tl.load(inverse_do_ptr) * TOP
    dp = OF_DP * amax_do * amax_v
    bounds = tl.where(column == 0, dp, tl.where(column == 1, dp * amax_k, TERMS * dp * amax_q))
    bounds = tl.where(column == 3, TERMS * amax_do, bounds)
    amax = tl.where(remembered > 0, remembered, bounds)
    top = tl.where(column == 0, TOP, OF_1)
    # The minimum of NaN and a number would be the number: NaN stays, and shows.
    scale = top / amax
    scale = tl.where(scale > LARGEST, LARGEST, scale)
    scale = tl.where(amax == 0, 1.0, scale)
    tl.store(out_ptr + column, scale)
    tl.store(out_ptr + 4 + column, 1.0 / scale)
    tl.store(out_ptr + 8, OF_1)
    tl.store(out_ptr + 9, 1.0 / OF_1)


@triton.jit
def roll(history_ptr, saturated_ptr, amaxes_ptr, scales_ptr, BACKWARDS, TOP, OF_1, ROWS: tl.constexpr):
    """Put amaxes (4,) before the history (BACKWARDS, 4), whose oldest row goes, and count those that saturated.

    One warp: all of it has loaded before any of it stores.
    """
    i, column = tl.arange(0, ROWS), tl.arange(0, 4)
    at = history_ptr + i[:, None] * 4 + column[None, :]
    stays = (i < BACKWARDS - 1)[:, None] & (column >= 0)[None, :]
    kept = tl.load(at, mask=stays, other=0.0)
    amaxes = tl.load(amaxes_ptr + column)
    too_large = amaxes * tl.load(scales_ptr + column) > tl.where(column == 0, TOP, OF_1)
    counted = tl.load(saturated_ptr + column) + too_large.to(tl.float32)
    # Rows move by one place, so no row may be stored before the next one was loaded.
    tl.debug_barrier()
    tl.store(at + 4, kept, mask=stays)
    tl.store(history_ptr + column, tl.where(tl.abs(amaxes) < float("inf"), amaxes, 0.0))
    tl.store(saturated_ptr + column, counted)


@triton.jit
def dequantize(codes_ptr, scale_inv_ptr, out_ptr, N, SOURCE: tl.constexpr, BLOCK: tl.constexpr):
    """Write what float8 data with one scale stands for, in the dtype of ``out_ptr``."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    codes = tl.load(codes_ptr + at, mask=inside, other=0)
    values = codes.to(SOURCE, bitcast=True).to(tl.float32) * tl.load(scale_inv_ptr)
    tl.store(out_ptr + at, values.to(out_ptr.dtype.element_ty), mask=inside)
