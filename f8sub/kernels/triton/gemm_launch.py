"""Which kernels multiply two operands with scales of blocks, in which tiles, with which arguments."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as LaidOutDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from f8sub.formats import ALL, Operand
from f8sub.kernels.gemm import block_scales
from f8sub.kernels.gemm.block_scales import ALIGNMENT, BLOCK
from f8sub.kernels.triton import gemm, hopper
from f8sub.kernels.triton.launch import cdiv
from f8sub.kernels.triton.launcher import Launch

SUM_BLOCK = 1024
"""What one program of ``add_parts`` sums."""

REGISTERS = {"MULTIPLIERS": 240, "LOADER": 24}
"""Of a thread, of each warpgroup of ``multiply_persistently``: two of the one and one of the other fit in 65536."""


@dataclass(frozen=True, slots=True)
class Config:
    """How a product is cut into tiles.

    Attributes:
        rows: of a tile, a power of two; ``persistent``: 128.
        cols: of a tile, likewise; ``persistent``: 256.
        stages: blocks of K that are loaded ahead.
        persistent: ``hopper.multiply_persistently``; else ``gemm.multiply``.
        group: tiles of one column that are made one after the other, so that L2 holds what they share.
        parts: of K that are summed by programs of their own; of ``persistent`` 1.
        warps: of a program of ``gemm.multiply``.

    Raises:
        ValueError: of ``persistent``, other tiles or K in parts, which that kernel does not make.
    """

    rows: int
    cols: int
    stages: int
    persistent: bool = False
    group: int = 8
    parts: int = 1
    warps: int = 4

    def __post_init__(self) -> None:
        if self.persistent and (self.rows, self.cols, self.parts) != (128, 256, 1):
            raise ValueError(f"the persistent kernel makes tiles of 128x256, found {self}")

    def __str__(self) -> str:
        kind = "persistent" if self.persistent else f"{self.warps} warps"
        parts = f", K in {self.parts}" if self.parts > 1 else ""
        return f"{self.rows}x{self.cols}, {kind}, {self.stages} stages, groups of {self.group}{parts}"


def multiplication(
    a: Operand, b: Operand, out_dtype: torch.dtype, config: Config, programs: int
) -> tuple[list[Launch], torch.Tensor]:
    """How to multiply ``a @ b.t()``.

    Args:
        a: (M, K), of a format that ``triton_mm.why_not`` has no reason against.
        b: (N, K), likewise.
        out_dtype: dtype of the result.
        config: the tiles.
        programs: multiprocessors of the device.

    Returns:
        The launches, in order, and what they fill: (M, N), ``out_dtype``.
    """
    rows, cols = a.data.shape[0], b.data.shape[0]
    out = a.data.new_empty((rows, cols), dtype=out_dtype)
    made = out if config.parts == 1 else out.new_empty((config.parts, rows, cols), dtype=torch.float32)
    left, right = _codes(a, config.rows, config.persistent), _codes(b, config.cols, config.persistent)
    a_scale, a_scaling = _scales(a, "A", config.rows, config.persistent)
    b_scale, b_scaling = _scales(b, "B", config.cols, config.persistent)
    names = ("a_scale", "b_scale") if config.persistent else ("a_scale_ptr", "b_scale_ptr")
    arguments = {
        "a": left,
        "b": right,
        **dict(zip(names, (a_scale, b_scale), strict=True)),
        "out_ptr": made,
        "M": rows,
        "N": cols,
        "BLOCKS": cdiv(a.data.shape[1], BLOCK),
        **a_scaling,
        **b_scaling,
        "ROWS": config.rows,
        "COLS": config.cols,
        "GROUP": config.group,
    }
    tiles = cdiv(rows, config.rows) * cdiv(cols, config.cols)
    if config.persistent:
        arguments |= {"STAGES": config.stages, **REGISTERS}
        return [Launch(hopper.multiply_persistently, min(tiles, programs), arguments, {"num_warps": 4})], out
    options = {"num_warps": config.warps, "num_stages": config.stages}
    launches = [Launch(gemm.multiply, tiles * config.parts, {**arguments, "PARTS": config.parts}, options)]
    if config.parts > 1:
        sizes = {"SIZE": out.numel(), "PARTS": config.parts, "BLOCK": SUM_BLOCK}
        sums = {"parts_ptr": made, "out_ptr": out, **sizes}
        launches.append(Launch(gemm.add_parts, cdiv(out.numel(), SUM_BLOCK), sums, {"num_warps": 4}))
    return launches, out


def _codes(operand: Operand, lines: int, laid_out: bool) -> Any:
    """A descriptor of the codes in blocks of (lines, 128); their rows have to begin at multiples of 16 bytes."""
    codes = operand.data
    if missing := -codes.shape[1] % ALIGNMENT:
        codes = torch.nn.functional.pad(codes.view(torch.uint8), (0, missing)).view(codes.dtype)
    elif codes.data_ptr() % ALIGNMENT:
        codes = codes.clone()
    if laid_out:
        return LaidOutDescriptor.from_tensor(codes, [lines, BLOCK], _layout(128, 8))
    return TensorDescriptor.from_tensor(codes, [lines, BLOCK])


def _scales(operand: Operand, side: str, lines: int, persistent: bool) -> tuple[Any, dict[str, int]]:
    """Where the scales are, and how they are read.

    Of squares as they are, of lines block by block of K; others are made one a line and block.
    ``hopper.multiply_persistently`` loads those by descriptors.
    """
    tile = operand.format.tile
    if tile.cols != ALL and tile.rows != ALL and tile.rows % BLOCK == 0 and (persistent or lines <= BLOCK):
        scales = operand.scale_inv.contiguous()
        return scales, _reading(side, scales.shape[1], tile.rows, tile.cols // BLOCK)
    if persistent:
        vectors = block_scales.vectors(operand).t()
        descriptor = LaidOutDescriptor.from_tensor(vectors, [1, lines], _layout(0, 32))
        return descriptor, _reading(side, vectors.shape[1], 1, 1)
    if tile.rows == 1 and tile.cols != ALL:
        by_block, depth = operand.scale_inv.t(), tile.cols // BLOCK
    else:
        by_block, depth = block_scales.spread(operand, 1, BLOCK, transposed=True), 1
    if by_block.stride(1) != 1:
        by_block = by_block.contiguous()
    return by_block, _reading(side, by_block.stride(0), 1, depth)


def _reading(side: str, stride: int, edge: int, depth: int) -> dict[str, int]:
    """Arguments that say how one side's scales are read."""
    return {f"{side.lower()}_stride": stride, f"{side}_EDGE": edge, f"{side}_DEPTH": depth}


@functools.cache
def _layout(swizzle: int, bits: int) -> Any:
    """How the accelerator lays out a block in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)
