"""Layer 1. ``torch._scaled_mm``: tensorwise and rowwise GEMMs, on CUDA through cuBLASLt and on the CPU."""

import functools

import torch

from f8sub.formats import ALL, Float8Format, Operand, Tile

TENSORWISE = Tile(ALL, ALL)
ROWWISE = Tile(1, ALL)

_CUDA_ALIGNMENT = 16
"""cuBLASLt takes float8 matrices whose dimensions are multiples of 16. Source: ATen/native/cuda/ScaledBlas.cpp."""


def why_not(a: Float8Format, b: Float8Format, device: torch.device) -> str | None:
    """Why this backend cannot run a GEMM of these formats on ``device``; None when it can."""
    if unknown := {str(f) for f in (a, b) if f.scale_rule.stored_as != torch.float32 or f.hadamard}:
        return f"takes float8 with float32 scales, not {', '.join(sorted(unknown))}"
    if unknown := {str(f.tile) for f in (a, b) if f.tile not in (TENSORWISE, ROWWISE)}:
        return f"takes one scale a tensor or a row, not tiles of {', '.join(sorted(unknown))}"
    if a.dtype == b.dtype == torch.float8_e5m2:
        return "takes at most one e5m2 operand"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return None if (major, minor) >= (8, 9) else f"needs SM 8.9 (Ada) or newer, found {major}.{minor}"
    if device.type == "cpu":
        return _why_not_cpu()
    return f"runs on cuda and cpu, not on {device.type}"


def takes_any_layout(device: torch.device) -> bool:
    """Whether operands need not be row-major on ``device``: the CPU multiplies them as float32 matrices."""
    return device.type == "cpu"


def gemm_nt(a: Operand, b: Operand, out_dtype: torch.dtype, fast_accum: bool) -> torch.Tensor:
    """``a @ b.t()``.

    Args:
        a: (M, K), tensorwise or rowwise.
        b: (N, K), tensorwise or rowwise. A scale of a whole tensor is repeated for the rows where the other
            operand has one a row.
        out_dtype: dtype of the result.
        fast_accum: keep partial sums in the tensor core's accumulator; no effect on the CPU.

    Returns:
        (M, N), ``out_dtype``.
    """
    a_scale_inv, b_scale_inv = a.scale_inv, b.scale_inv
    if a_scale_inv.numel() > 1 or b_scale_inv.numel() > 1:
        a_scale_inv = a_scale_inv.expand(a.data.shape[0], 1).contiguous()
        b_scale_inv = b_scale_inv.expand(b.data.shape[0], 1).contiguous().t()
    if a.data.is_cuda:
        return _gemm_nt_cuda(a.data, b.data, a_scale_inv, b_scale_inv, out_dtype, fast_accum)
    return torch._scaled_mm(
        a.data, b.data.t(), a_scale_inv, b_scale_inv, out_dtype=out_dtype, use_fast_accum=fast_accum
    )


def _gemm_nt_cuda(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """The same with what cuBLASLt asks for: dimensions padded with zeros, rowwise results in bf16 only."""
    rows, cols = a.shape[0], b.shape[0]
    rowwise = a_scale_inv.numel() > 1 or b_scale_inv.numel() > 1
    a, b = _aligned(a), _aligned(b)
    if rowwise:
        a_scale_inv = _padded_rows(a_scale_inv, a.shape[0])
        b_scale_inv = _padded_rows(b_scale_inv.t(), b.shape[0]).t()
    y = torch._scaled_mm(
        a,
        b.t(),
        a_scale_inv,
        b_scale_inv,
        out_dtype=torch.bfloat16 if rowwise else out_dtype,
        use_fast_accum=fast_accum,
    )
    return y[:rows, :cols].to(out_dtype)


def _aligned(codes: torch.Tensor) -> torch.Tensor:
    missing_rows, missing_cols = (-size % _CUDA_ALIGNMENT for size in codes.shape)
    if not missing_rows and not missing_cols:
        return codes
    padded = torch.nn.functional.pad(codes.view(torch.uint8), (0, missing_cols, 0, missing_rows))
    return padded.view(codes.dtype)


def _padded_rows(scale_inv: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.nn.functional.pad(scale_inv, (0, 0, 0, rows - scale_inv.shape[0]), value=1.0)


@functools.cache
def _why_not_cpu() -> str | None:
    """Tried rather than looked up: which scales the CPU takes differs between builds of one torch version."""
    codes, scale_inv = torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(codes, codes.t(), scale_inv, scale_inv.t(), out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError) as error:
        return f"torch {torch.__version__} has no rowwise _scaled_mm for the CPU ({error})"
    return None
