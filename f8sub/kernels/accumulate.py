"""How the reference GEMM adds up: in float32, or in parts as a tensor core's accumulator makes it necessary.

Hopper's tensor cores keep about 14 bits of a partial sum (arXiv 2412.19437, 3.3.2). Without fast accumulation a kernel
moves it to a float32 register every 128 elements of K; the reference adds in the same order.
"""

import torch

PROMOTION = 128
"""Elements of K in one partial sum. Source: DeepGEMM, CUTLASS's default for split accumulation, cuBLAS."""


def matmul_nt(a: torch.Tensor, b: torch.Tensor, fast_accum: bool) -> torch.Tensor:
    """``a @ b.t()`` of float32 matrices: (M, K) x (N, K) -> (M, N).

    With ``fast_accum`` one sum over all of K; else partial sums of ``PROMOTION`` elements, added in float32.

    Numerics:
        In float64 where torch was told to round the factors of float32 products (``set_float32_matmul_precision``):
        a code times its scale has more bits than TF32 keeps.
    """
    if _rounds_factors(a):
        a, b = a.double(), b.double()
    depth = max(a.shape[1], 1) if fast_accum else PROMOTION
    total = a.new_zeros((a.shape[0], b.shape[0]))
    for part_of_a, part_of_b in zip(a.split(depth, 1), b.split(depth, 1), strict=True):
        add_partial_sum(total, part_of_a, part_of_b)
    return total


def add_partial_sum(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add ``a @ b.t()`` to ``total``, in place: the one thing that a narrower accumulator would do differently."""
    total.addmm_(a, b.t())


def _rounds_factors(a: torch.Tensor) -> bool:
    backend = torch.backends.cuda if a.is_cuda else torch.backends.mkldnn
    return backend.matmul.fp32_precision in ("tf32", "bf16")
