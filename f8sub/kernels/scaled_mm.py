"""Layer 1. ``torch._scaled_mm``: one scale a tensor, a row or a block of 128, on CUDA through cuBLASLt; CPU too.

What cuBLASLt takes: dimensions that are multiples of 16, so operands are filled up with zeros; blocks of 1x128 and of
128x128, so scales of larger tiles are repeated for the blocks in them.
"""

import functools

import torch
from torch.nn.functional import ScalingType, scaled_mm

from f8sub.formats import ALL, Float8Format, Operand, Tile
from f8sub.kernels import reference
from f8sub.torch_compat import constant_result

TENSORWISE = Tile(ALL, ALL)
ROWWISE = Tile(1, ALL)

BLOCK = 128
"""Elements of K under one scale. Source: cuBLASLt's VEC128_32F and BLK128x128_32F scale modes, CUDA 12.9, SM 9.0."""

_CUDA_ALIGNMENT = 16
"""cuBLASLt takes float8 matrices whose dimensions are multiples of 16. Source: ATen/native/cuda/ScaledBlas.cpp."""

_BLOCK_SCALES_ALIGNMENT = 4
"""A row of 128x128 scales begins at a multiple of 16 bytes. Source: the same file."""


def why_not(a: Float8Format, b: Float8Format, device: torch.device) -> str | None:
    """Why this backend cannot run a GEMM of these formats on ``device``; None when it can."""
    if unknown := {str(f) for f in (a, b) if not f.is_plain}:
        return f"takes float8 with float32 scales, not {', '.join(sorted(unknown))}"
    if a.dtype == b.dtype == torch.float8_e5m2:
        return "takes at most one e5m2 operand"
    if device.type == "cuda":
        return _why_not_cuda(a, b, device)
    if device.type != "cpu":
        return f"runs on cuda and cpu, not on {device.type}"
    if unknown := {str(f.tile) for f in (a, b) if f.tile not in (TENSORWISE, ROWWISE)}:
        return f"takes one scale a tensor or a row on the CPU, not tiles of {', '.join(sorted(unknown))}"
    return None if a.tile == b.tile == TENSORWISE else _why_not_rows_on_the_cpu()


def takes_any_layout(device: torch.device) -> bool:
    """Whether operands need not be row-major on ``device``: the CPU multiplies them as float32 matrices."""
    return device.type == "cpu"


def is_traceable(a: Float8Format, b: Float8Format) -> bool:
    """Whether ``torch.compile`` may look into a GEMM of these formats.

    Not with scales of blocks: dynamo of 2.11 does not know ``_scaled_mm_v2``, and Inductor of 2.13 calls the first
    version of it with scales that are laid out for the second.
    """
    return not _in_blocks(a, b)


def gemm_nt(a: Operand, b: Operand, out_dtype: torch.dtype, fast_accum: bool) -> torch.Tensor:
    """``a @ b.t()``.

    Args:
        a: (M, K), of a tile that ``why_not`` accepts.
        b: (N, K). A scale of a whole tensor is repeated for the rows where the other operand has one a row.
        out_dtype: dtype of the result.
        fast_accum: keep partial sums in the tensor core's accumulator; no effect on the CPU, nor with blocks, whose
            partial sums are scaled every 128 elements.

    Returns:
        (M, N), ``out_dtype``.
    """
    a_scale_inv, b_scale_inv = a.scale_inv, b.scale_inv
    if a_scale_inv.numel() > 1 or b_scale_inv.numel() > 1:
        if _in_blocks(a.format, b.format):
            return _gemm_nt_in_blocks(a, b, out_dtype)
        a_scale_inv = a_scale_inv.expand(a.data.shape[0], 1).contiguous()
        b_scale_inv = b_scale_inv.expand(b.data.shape[0], 1).contiguous().t()
    if a.data.is_cuda:
        return _gemm_nt_cuda(a.data, b.data, a_scale_inv, b_scale_inv, out_dtype, fast_accum)
    # t(), not mT: compiled code saves the float8 codes behind the one and casts x anew in backward behind the other.
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
    """The same with what cuBLASLt asks for: dimensions padded with zeros; rowwise results in bf16 off Hopper."""
    rows, cols = a.shape[0], b.shape[0]
    rowwise = a_scale_inv.numel() > 1 or b_scale_inv.numel() > 1
    a, b = _aligned(a), _aligned(b)
    made = out_dtype
    if rowwise:
        a_scale_inv = _padded_rows(a_scale_inv, a.shape[0])
        b_scale_inv = _padded_rows(b_scale_inv.t(), b.shape[0]).t()
        if out_dtype != torch.bfloat16 and _why_no_vector_scales(a.device) is not None:
            made = torch.bfloat16
    y = torch._scaled_mm(a, b.t(), a_scale_inv, b_scale_inv, out_dtype=made, use_fast_accum=fast_accum)
    return y[:rows, :cols].to(out_dtype)


def _gemm_nt_in_blocks(a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
    """The same with scales of blocks: 1x128 for ``a``, and 128x128 for ``b`` where its tiles are made of those."""
    left, right = _aligned(a.data), _aligned(b.data).t()
    a_scales, rows_of_b = _block_scales(a, 1), b.format.tile.rows
    if (rows_of_b == ALL or rows_of_b % BLOCK == 0) and a.format.dtype == b.format.dtype:
        vector, square = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        y = scaled_mm(left, right, a_scales, vector, _block_scales(b, BLOCK), square, output_dtype=out_dtype)
    else:
        # The first version tells 1x128 by the shapes of the scales, and takes e5m2, which the second refuses.
        y = torch._scaled_mm(left, right, a_scales, _block_scales(b, 1).t(), out_dtype=out_dtype)
    return y[: a.data.shape[0], : b.data.shape[0]]


def _block_scales(operand: Operand, rows: int) -> torch.Tensor:
    """``scale_inv`` of every block of (rows, 128), laid out as ``_scaled_mm_v2`` asks.

    Returns:
        1x128: (rows filled up to a multiple of 16, blocks), column-major. 128x128: (blocks of K filled up to a multiple
        of 4, blocks of rows), column-major.
    """
    tile, (height, depth) = operand.format.tile, operand.shape
    count = Tile(rows, BLOCK).scale_shape((height, depth))
    tile_in_blocks = Tile(
        ALL if tile.rows == ALL else tile.rows // rows, ALL if tile.cols == ALL else tile.cols // BLOCK
    )
    scales = reference.spread(operand.scale_inv, tile_in_blocks, torch.Size(count))
    if rows == 1:
        laid_out = scales.new_ones(count[1], height + -height % _CUDA_ALIGNMENT)
        laid_out[:, :height] = scales.t()
    else:
        laid_out = scales.new_ones(count[0], count[1] + -count[1] % _BLOCK_SCALES_ALIGNMENT)
        laid_out[:, : count[1]] = scales
    return laid_out.t()


def _in_blocks(a: Float8Format, b: Float8Format) -> bool:
    return _is_block(a.tile) or _is_block(b.tile)


def _is_block(tile: Tile) -> bool:
    """Neither a whole matrix nor whole rows."""
    return tile.cols != ALL or tile.rows not in (1, ALL)


def _aligned(codes: torch.Tensor) -> torch.Tensor:
    missing_rows, missing_cols = (-size % _CUDA_ALIGNMENT for size in codes.shape)
    if not missing_rows and not missing_cols:
        return codes
    padded = torch.nn.functional.pad(codes.view(torch.uint8), (0, missing_cols, 0, missing_rows))
    return padded.view(codes.dtype)


def _padded_rows(scale_inv: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.nn.functional.pad(scale_inv, (0, 0, 0, rows - scale_inv.shape[0]), value=1.0)


def _why_not_cuda(a: Float8Format, b: Float8Format, device: torch.device) -> str | None:
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return f"needs SM 8.9 (Ada) or newer, found {major}.{minor}"
    if not _in_blocks(a, b):
        return None
    if unknown := {str(f.tile) for f in (a, b) if f.tile.cols != ALL and f.tile.cols % BLOCK}:
        return f"takes one scale a tensor, a row or tiles of whole blocks of 1x128, not {', '.join(sorted(unknown))}"
    return _why_no_vector_scales(device)


@constant_result
def _why_no_vector_scales(device: torch.device) -> str | None:
    """Why cuBLASLt does not take more than one scale an operand; what ``_scaled_mm`` then has for rows is CUTLASS."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    built_with = torch.version.cuda or "0.0"
    if major == 9 and tuple(map(int, built_with.split("."))) >= (12, 9):
        return None
    return f"multiplies blocks on SM 9.0 (Hopper) with CUDA 12.9 or newer, found SM {major}.{minor}, CUDA {built_with}"


@functools.cache
def _why_not_rows_on_the_cpu() -> str | None:
    """Tried rather than looked up: which scales the CPU takes differs between builds of one torch version."""
    codes, scale_inv = torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(codes, codes.t(), scale_inv, scale_inv.t(), out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError) as error:
        return f"torch {torch.__version__} has no rowwise _scaled_mm for the CPU ({error})"
    return None
