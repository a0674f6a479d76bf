"""A plain split-K GEMM of operands with scales of blocks: what ``scripts/tune_gemm.py`` compares few rows with.

As in Triton's tutorials and in vLLM's and SGLang's block-scaled kernels: pointers and masks, programs that each take a
part of K and add their sums to a zeroed float32 result with atomics, which is then cast.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from f8sub import Operand
from f8sub.kernels.gemm import block_scales

ROWS, COLS = 64, 64


@triton.jit
def multiply_and_add(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, out_ptr, M, N, K, a_stride, b_stride,
    ROWS: tl.constexpr, COLS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One tile of one part of K; every block of K has a scale a line of either operand."""
    row, col, part = tl.program_id(0) * ROWS, tl.program_id(1) * COLS, tl.program_id(2)
    i, j, depth = row + tl.arange(0, ROWS), col + tl.arange(0, COLS), tl.arange(0, 128)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for k in range(part, tl.cdiv(K, 128), SPLIT):
        inside = (k * 128 + depth < K)[None, :]
        a = tl.load(
            a_ptr + i[:, None] * K + k * 128 + depth[None, :], mask=inside & (i < M)[:, None], other=0.0
        )
        b = tl.load(
            b_ptr + j[:, None] * K + k * 128 + depth[None, :], mask=inside & (j < N)[:, None], other=0.0
        )
        a_scale = tl.load(a_scale_ptr + k * a_stride + i, mask=i < M, other=0.0)
        b_scale = tl.load(b_scale_ptr + k * b_stride + j, mask=j < N, other=0.0)
        total += tl.dot(a, b.T) * a_scale[:, None] * b_scale[None, :]
    pointers = out_ptr + i[:, None] * N + j[None, :]
    tl.atomic_add(pointers, total, mask=(i < M)[:, None] & (j < N)[None, :], sem="relaxed")


class SplitK:
    """``a @ b.t()`` in bfloat16, of K in ``split`` parts."""

    def __init__(self, split: int) -> None:
        self.split = split

    def __call__(self, given: tuple[Operand, Operand]) -> torch.Tensor:
        """Of both operands; a few microseconds of laying out the scales as other kernels' are."""
        a, b = given
        rows, depth = a.data.shape
        cols = b.data.shape[0]
        a_scales, b_scales = (block_scales.vectors(operand).t() for operand in given)
        out = torch.zeros(rows, cols, device=a.data.device)
        grid = (triton.cdiv(rows, ROWS), triton.cdiv(cols, COLS), self.split)
        multiply_and_add[grid](
            a.data, b.data, a_scales, b_scales, out, rows, cols, depth, a_scales.shape[1], b_scales.shape[1],
            ROWS, COLS, self.split, num_warps=4, num_stages=4,
        )  # fmt: skip
        return out.bfloat16()
