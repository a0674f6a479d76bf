"""Which kernels multiply two operands with scales of blocks, in which tiles, with which arguments."""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from f8sub.formats import ALL, Operand
from f8sub.kernels.gemm import block_scales
from f8sub.kernels.gemm.block_scales import ALIGNMENT, BLOCK
from f8sub.kernels.gemm.tuning import Config
from f8sub.kernels.triton import gemm, gemm_sm90
from f8sub.kernels.triton.launch import Launch
from f8sub.kernels.triton.quantize_launch import cdiv
from f8sub.kernels.triton.triton_compat import LaidOutDescriptor, TensorDescriptor, gl

SUM_BLOCK = 1024
"""Elements that one program of ``add_parts`` sums."""

REGISTERS = {"MULTIPLIERS": 240, "LOADER": 24}
"""Registers of a thread of each warpgroup of ``multiply_persistently``: two multipliers and a loader fit in 65536."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one scale serves: ``edge`` lines, 1 where scales are not of squares, by ``depth`` blocks of K."""

    edge: int
    depth: int


def multiplication(
    a: Operand, b: Operand, out_dtype: torch.dtype, config: Config, programs: int
) -> tuple[list[Launch], torch.Tensor]:
    """How to multiply ``a @ b.t()``, (M, K) and (N, K), of formats that ``triton_mm.why_not`` has no reason against.

    ``programs`` is the number of the device's multiprocessors. Returns the launches, in order, and what they fill:
    (M, N), ``out_dtype``.
    """
    rows, cols = a.data.shape[0], b.data.shape[0]
    out = a.data.new_empty((rows, cols), dtype=out_dtype)
    made = out if config.parts == 1 else out.new_empty((config.parts, rows, cols), dtype=torch.float32)
    arguments = {
        **_side("a", a, config.rows, config.persistent),
        **_side("b", b, config.cols, config.persistent),
        "out_ptr": made,
        "M": rows,
        "N": cols,
        "BLOCKS": cdiv(a.data.shape[1], BLOCK),
        "CONFIG": config,
    }
    tiles = cdiv(rows, config.rows) * cdiv(cols, config.cols)
    if config.persistent:
        arguments |= REGISTERS
        return [
            Launch(gemm_sm90.multiply_persistently, min(tiles, programs), arguments, {"num_warps": 4})
        ], out
    options = {"num_warps": config.warps, "num_stages": config.stages}
    launches = [Launch(gemm.multiply, tiles * config.parts, arguments, options)]
    if config.parts > 1:
        sizes = {"SIZE": out.numel(), "PARTS": config.parts, "BLOCK": SUM_BLOCK}
        sums = {"parts_ptr": made, "out_ptr": out, **sizes}
        launches.append(Launch(gemm.add_parts, cdiv(out.numel(), SUM_BLOCK), sums, {"num_warps": 4}))
    return launches, out


def _side(name: str, operand: Operand, lines: int, persistent: bool) -> dict[str, Any]:
    """The arguments of one operand: its codes in blocks of (lines, 128), its scales, and how these are read."""
    codes = operand.data
    # Rows have to begin at multiples of 16 bytes.
    if missing := -codes.shape[1] % ALIGNMENT:
        codes = torch.nn.functional.pad(codes.view(torch.uint8), (0, missing)).view(codes.dtype)
    elif codes.data_ptr() % ALIGNMENT:
        codes = codes.clone()
    scale, stride, edge, depth = _scales(operand, lines, persistent)
    if persistent:
        blocks = LaidOutDescriptor.from_tensor(codes, [lines, BLOCK], layout(128, 8))
    else:
        blocks = TensorDescriptor.from_tensor(codes, [lines, BLOCK])
    reading = {f"{name}_stride": stride, name.upper(): Reading(edge, depth)}
    return {name: blocks, f"{name}_scale": scale, **reading}


def _scales(operand: Operand, lines: int, persistent: bool) -> tuple[Any, int, int, int]:
    """Scales, their stride, and the lines and blocks of K that each serves.

    Scales of squares are read as they are, scales of lines block by block of K; others are made one a line and block.
    ``hopper.multiply_persistently`` loads scales of lines by descriptors.
    """
    tile = operand.format.tile
    if tile.cols != ALL and tile.rows != ALL and tile.rows % BLOCK == 0 and (persistent or lines <= BLOCK):
        scales = operand.scale_inv.contiguous()
        return scales, scales.shape[1], tile.rows, tile.cols // BLOCK
    if persistent:
        vectors = block_scales.vectors(operand).t()
        descriptor = LaidOutDescriptor.from_tensor(vectors, [1, lines], layout(0, 32))
        return descriptor, vectors.shape[1], 1, 1
    if tile.rows == 1 and tile.cols != ALL:
        by_block, depth = operand.scale_inv.t(), tile.cols // BLOCK
    else:
        by_block, depth = block_scales.spread(operand, 1, BLOCK, transposed=True), 1
    if by_block.stride(1) != 1:
        by_block = by_block.contiguous()
    return by_block, by_block.stride(0), 1, depth


@functools.cache
def layout(swizzle: int, bits: int) -> Any:
    """How the accelerator lays out a block in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)
