"""``torch._scaled_mm``: one scale per tensor, row or block, on CUDA through cuBLASLt; CPU too.

cuBLASLt takes dimensions that are multiples of 16, so operands are filled up with zeros; and blocks of 1x128 and of
128x128 (Hopper), so scales of larger tiles are repeated for the blocks in them.

With scales of one byte cuBLASLt reads the scales in a layout of its own. Source: "1D Block Scaling Factors Layout" of
cuBLAS's documentation, and the checks of ATen/native/cuda/ScaledBlas.cpp.
"""

import functools

import torch
from torch.nn.functional import ScalingType, SwizzleType, pad, scaled_mm

from f8sub.formats import ALL, E2M1, Float8Format, Operand, ScaleRule, Tile
from f8sub.kernels.gemm import block_scales
from f8sub.kernels.gemm.block_scales import ALIGNMENT, BLOCK, aligned, cut, whole_blocks
from f8sub.torch_compat import (
    aten_scaled_mm,
    constant_result,
    cpu_has_amx,
    cpu_has_amx_fp16,
    cuda_version,
    no_dispatch_modes,
)

_BLOCKS = {
    ScaleRule.E8M0: (torch.float8_e4m3fn, 32, ScalingType.BlockWise1x32),
    ScaleRule.TWO_LEVEL: (E2M1, 16, ScalingType.BlockWise1x16),
}
"""What Blackwell's tensor cores scale themselves: dtype of the codes, elements of K under one scale, torch's name."""


def why_not_of_a_byte(a: Float8Format, b: Float8Format, device: torch.device) -> str | None:
    """Return why ``torch._scaled_mm`` does not multiply two formats that are not both plain; None where it does."""
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


def gemm_of_a_byte(a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
    """Compute y [M, N] = a [M, K] @ b [N, K].t() of formats with one-byte scales that ``why_not`` lets pass."""
    _, size, kind = _BLOCKS[a.format.scale_rule]
    # nvfp4 has a second level, one float32 scale per tensor; mxfp8 has none.
    levels = len(a.tensors) - 1
    kinds = [kind, ScalingType.TensorWise][:levels]
    swizzles = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE][:levels]
    left, right = aligned(a.data), aligned(b.data).t()
    of_a, of_b = ([swizzled(operand, size), *operand.tensors[2:]] for operand in (a, b))
    # y [M, N], operands and scales filled up; what filled them up is cut off below
    y = scaled_mm(left, right, of_a, kinds, of_b, kinds, swizzles, swizzles, output_dtype=out_dtype)
    return cut(y, a.data.shape[0], b.data.shape[0])


def swizzled(operand: Operand, size: int) -> torch.Tensor:
    """Return scales of 1 x ``size``, one byte each, in SWIZZLE_32_4_4; flat.

    They come in atoms of 128 rows by 4 blocks, in row-major order. Within an atom the scale of row r and block c is
    byte ``16 * (r % 32) + 4 * (r // 32) + c``: four runs of 32 rows interleaved.
    """
    scales = block_scales.spread(operand, 1, size)
    rows, blocks = scales.shape
    # Zero bytes fill up the last atoms: they meet only the zeros that fill up the data.
    filled = pad(scales.view(torch.uint8), (0, -blocks % 4, 0, -rows % 128))
    # [atoms of rows, r // 32, r % 32, atoms of blocks, c]
    atoms = filled.view(-1, 4, 32, filled.shape[1] // 4, 4)
    return atoms.permute(0, 3, 2, 1, 4).flatten().view(scales.dtype)


TENSORWISE = Tile(ALL, ALL)
ROWWISE = Tile(1, ALL)


def why_not(a: Float8Format, b: Float8Format, device: torch.device) -> str | None:
    """Return why it cannot run, see ``select.Backend``."""
    if not a.is_plain or not b.is_plain:
        return why_not_of_a_byte(a, b, device)
    # cuBLASLt has no e5m2 by e5m2.
    if a.dtype == b.dtype == torch.float8_e5m2:
        return "takes at most one e5m2 operand"
    if device.type == "cuda":
        return _why_not_cuda(a, b, device)
    if device.type != "cpu":
        return f"runs on cuda and cpu, not on {device.type}"
    if unknown := {str(f.tile) for f in (a, b) if f.tile not in (TENSORWISE, ROWWISE)}:
        return f"takes one scale per tensor or per row on the CPU, not tiles of {', '.join(sorted(unknown))}"
    return None if a.tile == b.tile == TENSORWISE else _why_not_rows_on_the_cpu()


def is_traceable(a: Operand, b: Operand) -> bool:
    """Return whether ``torch.compile`` may look into this GEMM.

    Not with scales of blocks: dynamo of 2.11 does not know ``_scaled_mm_v2``, and Inductor of 2.13 calls the first
    version of it with scales that are laid out for the second. Nor where it depends on a dynamic shape whether a
    dimension is filled up: torch would compile once more for those that are and those that are not.
    """
    if _in_blocks(a.format, b.format):
        return False
    return not a.data.is_cuda or all(map(_is_settled, (*a.data.shape, b.data.shape[0])))


def _is_settled(size: int) -> bool:
    """Return whether dynamo knows without a guard if a size is a multiple of ``ALIGNMENT``."""
    known = torch.fx.experimental.symbolic_shapes.statically_known_true
    return known(size % ALIGNMENT == 0) or known(size % ALIGNMENT != 0)


def gemm_nt(a: Operand, b: Operand, out_dtype: torch.dtype, fast_accum: bool) -> torch.Tensor:
    """Compute y [M, N] = a [M, K] @ b [N, K].t().

    A scale of a whole tensor is repeated for the rows where the other operand has one per row, and on CPUs that are
    slow with it as it is. ``fast_accum`` keeps partial sums in the tensor core's accumulator; it has no effect on the
    CPU, nor with blocks, whose partial sums are scaled every 128 elements.
    """
    left, a_scale_inv, format, _ = a
    right, b_scale_inv, b_format, _ = b
    if not format.is_plain:
        return gemm_of_a_byte(a, b, out_dtype)
    # More than one scale: per row or per block.
    has_rows = a_scale_inv.numel() > 1 or b_scale_inv.numel() > 1
    if has_rows or (left.dtype is right.dtype and left.is_cpu and _onednn_loops()):
        if _in_blocks(format, b_format):
            return _gemm_nt_in_blocks(a, b, out_dtype)
        return gemm_nt_by_row(a, b, out_dtype, fast_accum)
    return _multiply(left, right, a_scale_inv, b_scale_inv, out_dtype, fast_accum)


def gemm_nt_by_row(a: Operand, b: Operand, out_dtype: torch.dtype, fast_accum: bool) -> torch.Tensor:
    """Compute ``gemm_nt`` by the kernel that takes one scale per row of both, which one of a whole tensor is made to.

    Of two tensors with one scale each it is another kernel than cuBLASLt's for those, faster at some shapes, and sums
    in another order.
    """
    of_a, of_b = _scales_by_row(a, b, ALIGNMENT if a.data.is_cuda else 1)
    return _multiply(a.data, b.data, of_a, of_b, out_dtype, fast_accum)


def _scales_by_row(a: Operand, b: Operand, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a's scales [M, 1] and b's [1, N]; repeated ones of whole tensors for as many rows as are a multiple."""
    of_a, of_b, rows, cols = a.scale_inv, b.scale_inv, a.data.shape[0], b.data.shape[0]
    if of_a.numel() > 1 or of_b.numel() > 1:
        return of_a.expand(rows, 1).contiguous(), of_b.expand(cols, 1).contiguous().t()
    # Rows that fill up the operands are zeros, whatever their scale is; and the second vector begins at 16 bytes.
    rows, cols = rows + -rows % multiple, cols + -cols % multiple
    # Both at once: before a product each small kernel costs as much as the other.
    of_a, of_b = torch.cat([of_a.expand(rows, 1), of_b.expand(cols, 1)]).split([rows, cols])
    return of_a, of_b.t()


def why_not_by_row(device: torch.device) -> str | None:
    """Return why ``gemm_nt_by_row`` is not to stand for ``gemm_nt`` of whole tensors: it would round all to bf16."""
    reason = _why_no_vector_scales(device)
    return None if reason is None else f"needs cuBLASLt's scales by row, and that {reason}"


def _multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    if a.is_cuda:
        return _gemm_nt_cuda(a, b, a_scale_inv, b_scale_inv, out_dtype, fast_accum)
    # t(), not mT: compiled code saves the float8 codes behind the one and casts x anew in backward behind the other.
    return aten_scaled_mm(a, b.t(), a_scale_inv, b_scale_inv, out_dtype=out_dtype, use_fast_accum=fast_accum)


def _gemm_nt_cuda(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    # cuBLASLt takes dimensions padded with zeros, and makes rowwise results in bf16 alone off Hopper.
    rows, cols = a.shape[0], b.shape[0]
    a, b = aligned(a), aligned(b)
    made = out_dtype
    if a_scale_inv.numel() > 1 or b_scale_inv.numel() > 1:
        # Rows that fill up the operands need scales as well: ones.
        a_scale_inv = _padded_rows(a_scale_inv, a.shape[0])
        b_scale_inv = _padded_rows(b_scale_inv.t(), b.shape[0]).t()
        if out_dtype != torch.bfloat16 and _why_no_vector_scales(a.device) is not None:
            made = torch.bfloat16
    # y [M, N] = a [M, K] @ b [N, K].t()
    y = aten_scaled_mm(a, b.t(), a_scale_inv, b_scale_inv, out_dtype=made, use_fast_accum=fast_accum)
    return cut(y, rows, cols).to(out_dtype)


def _gemm_nt_in_blocks(a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
    left, right = aligned(a.data), aligned(b.data).t()
    if whole_blocks(b.format.tile.rows, BLOCK) and a.format.dtype == b.format.dtype:
        # Scales are of 1x128 for ``a``, and of 128x128 for ``b`` where its tiles are made of those.
        of_a, of_b = block_scales.vectors(a), block_scales.squares(b)
        vector, square = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        y = scaled_mm(left, right, of_a, vector, of_b, square, output_dtype=out_dtype)
    else:
        # The first version tells 1x128 by the shapes of the scales, and takes e5m2, which the second refuses.
        of_a, of_b = block_scales.vectors(a), block_scales.vectors(b).t()
        y = aten_scaled_mm(left, right, of_a, of_b, out_dtype=out_dtype)
    return cut(y, a.data.shape[0], b.data.shape[0])


def _in_blocks(a: Float8Format, b: Float8Format) -> bool:
    return _is_block(a.tile) or _is_block(b.tile)


def _is_block(tile: Tile) -> bool:
    return tile.cols != ALL or tile.rows not in (1, ALL)


def _padded_rows(scale_inv: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - scale_inv.shape[0]
    return pad(scale_inv, (0, 0, 0, missing), value=1.0) if missing else scale_inv


def _why_not_cuda(a: Float8Format, b: Float8Format, device: torch.device) -> str | None:
    major, minor = torch.cuda.get_device_capability(device)
    # Ada is the first with float8 tensor cores.
    if (major, minor) < (8, 9):
        return f"needs SM 8.9 (Ada) or newer, found {major}.{minor}"
    if not _in_blocks(a, b):
        return None
    if unknown := {str(f.tile) for f in (a, b) if not whole_blocks(f.tile.cols, BLOCK)}:
        return f"takes one scale per tensor, per row or per whole block of 1x128, not {', '.join(sorted(unknown))}"
    return _why_no_vector_scales(device)


@constant_result
def _why_no_vector_scales(device: torch.device) -> str | None:
    """Return why cuBLASLt takes no more than one scale per operand; for rows ``_scaled_mm`` then has CUTLASS."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if major == 9 and cuda_version() >= (12, 9):
        return None
    return (
        "multiplies blocks with float32 scales on SM 9.0 (Hopper) with CUDA 12.9 or newer, found SM "
        f"{major}.{minor}, CUDA {torch.version.cuda}"
    )


@constant_result
def _onednn_loops() -> bool:
    """Return whether torch takes oneDNN in vain for operands of one dtype under one scale each on this CPU.

    ATen's ``_scaled_mm_out_cpu`` does where there is AMX; oneDNN has float8 kernels for AMX-FP16 alone, and elsewhere
    (Sapphire and Emerald Rapids) its plain loop takes 42 ns per multiply-add. Rows are multiplied in float32: 0.4 ns.
    """
    return cpu_has_amx() and not cpu_has_amx_fp16() and _why_not_rows_on_the_cpu() is None


@functools.cache
def _why_not_rows_on_the_cpu() -> str | None:
    """Try rowwise scales rather than look them up: which the CPU takes differs between builds of one torch version."""
    try:
        with no_dispatch_modes():
            codes = torch.zeros(16, 16, dtype=torch.float8_e4m3fn, device="cpu")
            scale_inv = torch.ones(16, 1, dtype=torch.float32, device="cpu")
            aten_scaled_mm(codes, codes.t(), scale_inv, scale_inv.t(), out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError) as error:
        return f"torch {torch.__version__} has no rowwise _scaled_mm for the CPU ({error})"
    return None
