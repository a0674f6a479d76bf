"""Chooses the kernels that multiply operands with scales of blocks, or by groups, their tiles and their arguments."""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from f8sub.formats import ALL, Operand
from f8sub.kernels.gemm import block_scales
from f8sub.kernels.gemm.block_scales import ALIGNMENT, BLOCK
from f8sub.kernels.gemm.tuning import Config, GroupedConfig, Rows
from f8sub.kernels.triton import gemm, gemm_sm90, grouped_gemm
from f8sub.kernels.triton.launch import Launch
from f8sub.kernels.triton.quantize_launch import cdiv
from f8sub.kernels.triton.triton_compat import LaidOutDescriptor, TensorDescriptor, gl

SUM_BLOCK = 1024
"""Elements that one program of ``add_parts`` sums."""

REGISTERS = {"MULTIPLIERS": 240, "LOADER": 24}
"""Registers of a thread of each warpgroup of ``multiply_persistently``: two multipliers and a loader fit in 65536."""


OF_ONE_GROUP = {
    **dict.fromkeys(("table_ptr", "added_ptr", "GROUPS", "A_LINES", "b_group_stride")),
    **dict.fromkeys(("OVER_ROWS", "FAST"), False),
}
"""Arguments of ``multiply_persistently`` for a product of two matrices, which needs no table."""


@dataclass(frozen=True, slots=True)
class ScaleBlock:
    """Tells what one scale of an operand serves.

    Attributes:
        edge: rows, 1 where scales are not of squares; 0 where scales are applied to the whole sum.
        depth: blocks of K.
        is_by_line: of scales that are applied to the whole sum, whether there is one per row; else one per group.
    """

    edge: int
    depth: int
    is_by_line: bool = False


def multiplication(
    a: Operand, b: Operand, out_dtype: torch.dtype, config: Config, programs: int
) -> tuple[list[Launch], torch.Tensor]:
    """Return how to multiply ``a @ b.t()``, (M, K) and (N, K), of formats that ``blockwise.why_not`` lets pass.

    ``programs`` is the number of the device's multiprocessors. Returns the launches, in order, and what they fill: (M,
    N), ``out_dtype``.
    """
    rows, cols = a.data.shape[0], b.data.shape[0]
    out = a.data.new_empty((rows, cols), dtype=out_dtype)
    # Partial sums stay float32, so that y [M, N] is rounded once.
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
        arguments |= REGISTERS | OF_ONE_GROUP
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
    """Return the arguments of one operand: its data in blocks of (lines, 128), its scales, and how these are read."""
    codes = operand.data
    # Rows have to begin at multiples of 16 bytes.
    # Zeros along K change no sum.
    if missing := -codes.shape[1] % ALIGNMENT:
        codes = torch.nn.functional.pad(codes.view(torch.uint8), (0, missing)).view(codes.dtype)
    elif codes.data_ptr() % ALIGNMENT:
        codes = codes.clone()
    scale, stride, edge, depth = _scales(operand, lines, persistent)
    if persistent:
        # A row of a block is 128 bytes, the widest swizzle, in which the tensor cores read without bank conflicts.
        blocks = LaidOutDescriptor.from_tensor(codes, [lines, BLOCK], layout(128, 8))
    else:
        blocks = TensorDescriptor.from_tensor(codes, [lines, BLOCK])
    reading = {f"{name}_stride": stride, name.upper(): ScaleBlock(edge, depth)}
    return {name: blocks, f"{name}_scale": scale, **reading}


def _scales(operand: Operand, lines: int, persistent: bool) -> tuple[Any, int, int, int]:
    """Return scales, their stride, and the rows and blocks of K that each serves.

    Scales of squares are read as they are, scales of rows block by block of K; others become one per row and block.
    ``gemm_sm90.multiply_persistently`` loads scales of rows by descriptors.
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
    """Return how the accelerator lays out a block in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)


FIELDS = 4
"""Numbers in a row of a table of tiles or groups."""

AT_ONCE = 16
"""Rows of a table that one program writes."""

ZEROED = 1024
"""Elements of a row past the last group that are written at once."""


def product_by_rows(  # noqa: PLR0913  (a product, and how it is launched)
    a: Operand,
    b: Operand,
    rows: Rows,
    out_dtype: torch.dtype,
    fast_accum: bool,
    config: GroupedConfig,
    programs: int,
    added: torch.Tensor | None = None,
) -> tuple[list[Launch], torch.Tensor]:
    """Return how to multiply rows with the matrix of their group: y (M, N) = x (M, K) @ w (E, N, K).

    Args:
        a: whose groups begin at rows ``rows.placed``. One scale per group is (E, 1).
        b: (E, N, K), with scales (E, n, k).
        rows: of the result; those past the last group become zeros.
        out_dtype: of the result.
        fast_accum: leave sums to the tensor cores' accumulators, where all scales are applied to whole sums.
        config: the tiles.
        programs: multiprocessors of the device.
        added: (M, N), contiguous, added to the rounded product; zeros in the rows past the last group. None for none.

    Returns:
        The launches, in order, and what they fill.
    """
    experts, cols, depth = b.data.shape
    # y [M, N]
    out = a.data.new_empty((rows.total, cols), dtype=out_dtype)
    # Each group has at most one tile that is not whole.
    most = min(rows.total, rows.total // config.rows + experts)
    writers = max(cdiv(most, AT_ONCE), programs)
    table = a.data.new_empty((writers * AT_ONCE + 1) * FIELDS, dtype=torch.int32)
    listing = {
        **_group_arguments(rows),
        "placed_ptr": rows.placed.contiguous(),
        "table_ptr": table,
        "out_ptr": out,
        "M": rows.total,
        "N": cols,
        "ROWS": config.rows,
        "BLOCK": ZEROED,
    }
    # (E * N, K): one descriptor for all experts; a tile's rows of ``b`` begin at group * N.
    flat = Operand(b.data.reshape(-1, depth), b.scale_inv, b.format)
    arguments = {
        **_grouped_side("a", a, config.rows, config.persistent, loads_scales=False),
        **_grouped_side("b", flat, config.cols, config.persistent, experts),
        "out_ptr": out,
        "added_ptr": added,
        "table_ptr": table,
        "M": rows.total,
        "N": cols,
        "BLOCKS": cdiv(depth, BLOCK),
        "GROUPS": experts,
    }
    tiles = most * cdiv(cols, config.cols)
    last = _grouped_multiplication(arguments, tiles, config, programs, fast_accum, over_rows=False)
    return [Launch(grouped_gemm.table_of_rows, writers, listing, {"num_warps": 4}), last], out


def product_over_rows(
    a: Operand,
    b: Operand,
    groups: Rows,
    out_dtype: torch.dtype,
    fast_accum: bool,
    config: GroupedConfig,
    programs: int,
) -> tuple[list[Launch], torch.Tensor]:
    """Return how to sum over the rows of each group: dw (E, N, K) from dy.t() (N, M) and x.t() (K, M).

    Args:
        a: scales of blocks are (N, m), one per row or one per group are (E, N) or (E, 1).
        b: the same.
        groups: of M, each from a multiple of 128 on, zeros between. Those without rows give zeros; their scales are
            finite.
        out_dtype: of the result.
        fast_accum: see ``product_by_rows``.
        config: the tiles.
        programs: multiprocessors of the device.
    """
    experts, rows, cols = len(groups.ends), a.data.shape[0], b.data.shape[0]
    # dw [E, N, K]
    out = a.data.new_empty((experts, rows, cols), dtype=out_dtype)
    table = a.data.new_empty(experts * FIELDS, dtype=torch.int32)
    listing = {**_group_arguments(groups), "table_ptr": table}
    arguments = {
        **_grouped_side("a", a, config.rows, config.persistent),
        **_grouped_side("b", b, config.cols, config.persistent),
        "out_ptr": out,
        "added_ptr": None,
        "table_ptr": table,
        "M": rows,
        "N": cols,
        "BLOCKS": cdiv(a.data.shape[1], BLOCK),
        "GROUPS": experts,
    }
    tiles = experts * cdiv(rows, config.rows) * cdiv(cols, config.cols)
    last = _grouped_multiplication(arguments, tiles, config, programs, fast_accum, over_rows=True)
    writers = cdiv(experts, AT_ONCE)
    return [Launch(grouped_gemm.table_of_groups, writers, listing, {"num_warps": 4}), last], out


def clearing(out: torch.Tensor, ends: torch.Tensor, programs: int) -> Launch:
    """Return how to write zeros into the rows of ``out``, (M, N), past the last group."""
    sizes = {"M": out.shape[0], "N": out.shape[1], "GROUPS": len(ends), "BLOCK": ZEROED}
    arguments = {"ends_ptr": ends.contiguous(), "out_ptr": out, **sizes}
    return Launch(grouped_gemm.clear_past, programs, arguments, {"num_warps": 4})


def _group_arguments(groups: Rows) -> dict[str, Any]:
    experts = len(groups.ends)
    return {
        "first_ptr": groups.first.contiguous(),
        "ends_ptr": groups.ends.contiguous(),
        "GROUPS": experts,
        "MOST": 1 << (experts - 1).bit_length(),
        "AT_ONCE": AT_ONCE,
    }


def _grouped_multiplication(
    arguments: dict[str, Any],
    tiles: int,
    config: GroupedConfig,
    programs: int,
    fast_accum: bool,
    over_rows: bool,
) -> Launch:
    """Return the launch of whichever kernel multiplies the tiles, of which there may be so many."""
    # Scales of blocks are applied to partial sums, which fast accumulation does not have.
    is_fast = fast_accum and arguments["A"].edge == arguments["B"].edge == 0
    arguments |= {"CONFIG": config, "OVER_ROWS": over_rows, "FAST": is_fast}
    if config.persistent:
        kernel = gemm_sm90.multiply_persistently
        return Launch(kernel, min(tiles, programs), arguments | REGISTERS, {"num_warps": 4})
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return Launch(grouped_gemm.multiply_groups, tiles, arguments, options)


def _grouped_side(
    name: str, operand: Operand, lines: int, persistent: bool, groups: int = 0, loads_scales: bool = True
) -> dict[str, Any]:
    """Return the arguments of one operand: data in blocks of (lines, 128), scales, and how these are read.

    Of ``groups`` matrices below each other, where there are any, scales of squares begin again in each. The tensor
    memory accelerator loads scales of rows where they begin at multiples of four: ``loads_scales``.
    """
    codes = operand.data.contiguous()
    if codes.data_ptr() % ALIGNMENT:
        codes = codes.clone()
    tile, scale = operand.format.tile, operand.scale_inv
    stride = group_stride = 0
    if tile.cols == ALL:
        reading, scale = ScaleBlock(0, 1, tile.rows == 1), scale.contiguous()
    elif tile.rows != 1:
        reading, scale = ScaleBlock(tile.rows, tile.cols // BLOCK), scale.contiguous()
        stride, group_stride = scale.shape[-1], scale.numel() // groups if groups else 0
    else:
        by_line = Operand(codes, scale.reshape(-1, scale.shape[-1]), operand.format)
        vectors = block_scales.vectors(by_line).t()
        reading, stride = ScaleBlock(1, 1), vectors.stride(0)
        scale = vectors
        if persistent and loads_scales:
            scale = LaidOutDescriptor.from_tensor(vectors, [1, lines], layout(0, 32))
    if persistent:
        blocks = LaidOutDescriptor.from_tensor(codes, [lines, BLOCK], layout(128, 8))
    else:
        blocks = TensorDescriptor.from_tensor(codes, [lines, BLOCK])
    made = {f"{name}_scale": scale, f"{name}_stride": stride, f"{name.upper()}_LINES": codes.shape[0]}
    return {name: blocks, **made, f"{name}_group_stride": group_stride, name.upper(): reading}
