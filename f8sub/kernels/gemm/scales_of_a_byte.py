"""``torch``'s product of operands with one byte a scale: what it takes, and in which layout it reads the scales.

Source: "1D Block Scaling Factors Layout" of cuBLAS's documentation, and the checks of ATen/native/cuda/ScaledBlas.cpp.
"""

import torch
from torch.nn.functional import ScalingType, SwizzleType, pad, scaled_mm

from f8sub.formats import E2M1, Float8Format, Operand, ScaleRule
from f8sub.kernels.gemm import block_scales
from f8sub.kernels.gemm.block_scales import aligned, cut
from f8sub.torch_compat import cuda_version

_BLOCKS = {
    ScaleRule.E8M0: (torch.float8_e4m3fn, 32, ScalingType.BlockWise1x32),
    ScaleRule.TWO_LEVEL: (E2M1, 16, ScalingType.BlockWise1x16),
}
"""What Blackwell's tensor cores scale themselves: dtype of the codes, elements of K under one scale, torch's name."""


def why_not(a: Float8Format, b: Float8Format, device: torch.device) -> str | None:
    """Why ``torch._scaled_mm`` does not multiply two formats that are not both plain; None where it does."""
    dtype, size, _ = _BLOCKS.get(a.scale_rule, (None, 1, None))
    taken = all(f.dtype == dtype and block_scales.whole_blocks(f.tile.cols, size) for f in (a, b))
    if a.scale_rule is not b.scale_rule or not taken:
        return (
            "takes float8 with float32 scales, e4m3 with e8m0 scales of 1x32, or e2m1 with scales of two levels of "
            f"1x16, both operands alike, not {a} and {b}"
        )
    if device.type != "cuda":
        return f"multiplies scales of one byte on cuda alone, not on {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if major >= 10 and cuda_version() >= (12, 8):
        return None
    return (
        "multiplies scales of one byte on SM 10.0 (Blackwell) or newer with CUDA 12.8 or newer, found SM "
        f"{major}.{minor}, CUDA {torch.version.cuda}"
    )


def gemm_nt(a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
    """``a @ b.t()``: (M, K) x (N, K) -> (M, N), of formats that ``why_not`` has no reason against."""
    _, size, kind = _BLOCKS[a.format.scale_rule]
    levels = len(a.tensors) - 1
    kinds = [kind, ScalingType.TensorWise][:levels]
    swizzles = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE][:levels]
    left, right = aligned(a.data), aligned(b.data).t()
    of_a, of_b = ([swizzled(operand, size), *operand.tensors[2:]] for operand in (a, b))
    y = scaled_mm(left, right, of_a, kinds, of_b, kinds, swizzles, swizzles, output_dtype=out_dtype)
    return cut(y, a.data.shape[0], b.data.shape[0])


def swizzled(operand: Operand, size: int) -> torch.Tensor:
    """Scales of 1 x ``size``, one byte each, in SWIZZLE_32_4_4; flat.

    They come in atoms of 128 rows by 4 blocks, in row-major order. Within an atom the scale of row r and block c is
    byte ``16 * (r % 32) + 4 * (r // 32) + c``: four bands of 32 rows interleaved. What fills up the last atoms are zero
    bytes, which meet no codes but zeros.
    """
    scales = block_scales.spread(operand, 1, size)
    rows, blocks = scales.shape
    filled = pad(scales.view(torch.uint8), (0, -blocks % 4, 0, -rows % 128))
    atoms = filled.view(-1, 4, 32, filled.shape[1] // 4, 4)
    return atoms.permute(0, 3, 2, 1, 4).flatten().view(scales.dtype)
