"""Layer 1. RMSNorm of bfloat16 matrices of whole tiles, read as pairs: see ``rms_norm``."""

import triton
import triton.language as tl

from f8sub.kernels.triton.paired import store_vectors
from f8sub.kernels.triton.pairs import left, load_pairs, product, right, rounded_pair
from f8sub.kernels.triton.tiles import place


@triton.jit
def normalized(pair, rstd, weight, ROUNDS: tl.constexpr):
    """``rms_norm.normalized`` of pairs, of which the weight's are too."""
    if ROUNDS:
        return product(rounded_pair(left(pair) * rstd, right(pair) * rstd), weight)
    return rounded_pair(left(pair) * rstd * left(weight), right(pair) * rstd * right(weight))


@triton.jit
def quantize_paired_normed_vectors(
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
    POWER_OF_2: tl.constexpr,
    ROUNDS: tl.constexpr,
    EDGE: tl.constexpr,
):
    """``rms_norm.quantize_normed_vectors``."""
    row, col = place(tl.program_id(0), M, N, EDGE, EDGE)
    even, odd = load_pairs(x_ptr, row, col, N, EDGE, EDGE, "evict_first")
    i, j = row + 2 * tl.arange(0, EDGE // 2), col // 2 + tl.arange(0, EDGE // 2)
    weight = tl.load(weight_ptr.to(tl.pointer_type(tl.int32)) + j, eviction_policy="evict_last")[None, :]
    even_rstd = tl.load(rstd_ptr + i, eviction_policy="evict_last")[:, None]
    odd_rstd = tl.load(rstd_ptr + i + 1, eviction_policy="evict_last")[:, None]
    store_vectors(
        row_ptr,
        row_scale_inv_ptr,
        col_ptr,
        col_scale_inv_ptr,
        normalized(even, even_rstd, weight, ROUNDS),
        normalized(odd, odd_rstd, weight, ROUNDS),
        row,
        col,
        M,
        N,
        TOP,
        POWER_OF_2,
        EDGE,
    )
