"""Amaxes of many matrices by one Triton launch, and the scales of all of them by another.

What no kernel takes is left to the caller.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from f8sub.formats import ALL, HIGH_PRECISION, Float8Format, Tile
from f8sub.host_copy import sent_to
from f8sub.kernels.scales import PriorScale
from f8sub.kernels.triton import support
from f8sub.kernels.triton.support import EDGE

if TYPE_CHECKING:
    from f8sub.kernels.triton.launch import Launch

BLOCK = 4096
"""Elements that a program has in registers: 32 in each of its threads."""

SPAN = 16384
"""Elements of a line that a program reads: as many as a program that reads a square of 128."""

SCALES = 1024
"""Entries of the table that a program makes scales of."""

_DTYPES = {dtype: number for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16))}


class ShardInTable(NamedTuple):
    """A part of a matrix, (rows, cols), adjacent in a row, and where in a table of amaxes its tiles are.

    ``tile`` are the blocks of the whole matrix, and ``offset`` is the row and column of it that the part begins at. The
    first tile that the part touches has its amax at ``entry``, the next row of tiles ``entry_stride`` entries later.
    """

    data: torch.Tensor
    tile: Tile
    offset: tuple[int, int]
    entry: int
    entry_stride: int

    @property
    def is_of_lines(self) -> bool:
        """True if each of its rows has an amax, or there is one for all of them."""
        return self.tile.cols == ALL and self.tile.rows in (1, ALL)

    @property
    def is_of_stacks(self) -> bool:
        """True if several rows have an amax, all of them whole, as those of an expert have."""
        return self.tile.cols == ALL and not self.is_of_lines and self.data.is_contiguous()

    def parts(self) -> "list[ShardInTable]":
        """The matrices of a stack, each with one amax; itself where it is none."""
        if not self.is_of_stacks:
            return [self]
        height, before = self.tile.rows, self.offset[0] % self.tile.rows
        starts = range(-before, len(self.data), height)
        return [
            ShardInTable(
                self.data[max(start, 0) : start + height],
                Tile(ALL, ALL),
                (0, 0),
                self.entry + number * self.entry_stride,
                0,
            )
            for number, start in enumerate(starts)
        ]


def takes(matrix: ShardInTable, device: torch.device) -> bool:
    """Return whether the kernel takes a matrix for a table on ``device``."""
    data, tile = matrix.data, matrix.tile
    edges = tile.rows, tile.cols
    blocks = ALL not in edges and all(edge % EDGE == 0 for edge in edges)
    return (
        data.device == device
        and support.takes(data)
        and data.dtype in HIGH_PRECISION
        and data.stride(1) == 1
        and (matrix.is_of_lines or matrix.is_of_stacks or blocks)
    )


def takes_amaxes(amax: torch.Tensor, format: Float8Format, through: torch.dtype) -> bool:
    """Return whether the kernel computes scales for a format, of amaxes that are rounded to ``through``."""
    return format.is_plain and through in HIGH_PRECISION and amax.is_contiguous() and support.takes(amax)


def amaxes(matrices: Sequence[ShardInTable], table: torch.Tensor) -> "list[Launch]":
    """Return the launches that find the amaxes of matrices whenever they are run, while the matrices stay in place.

    The amax of each tile is the maximum of what is in the table and ``scales.shard_amax``: infinity where the tile
    holds NaN or infinity. Matrices whose rows do not begin at multiples of 16 bytes have a launch of their own.

    Args:
        matrices: those that the kernel ``takes``.
        table: float32, (entries,), not negative.
    """
    parts = [part for matrix in matrices for part in matrix.parts()]
    aligned = [part for part in parts if _is_aligned(part)]
    others = [part for part in parts if not _is_aligned(part)]
    return [_amaxes(some, table, some is aligned) for some in (aligned, others) if some]


def scales(
    amax: torch.Tensor,
    prior: PriorScale | None,
    scale: torch.Tensor,
    scale_inv: torch.Tensor,
    format: Float8Format,
    through: torch.dtype,
) -> "Launch":
    """Return the launch that writes the scales of amaxes that ``takes_amaxes`` takes: ``scales.scales_or_nan``.

    ``prior`` are scales that cover the amaxes, None for those of the amaxes themselves; ``scale`` and ``scale_inv`` are
    written. All are float32, contiguous and of one size.
    """
    from f8sub.kernels.triton import launch, multi_tensor, quantize_launch

    arguments = {
        "amax_ptr": amax,
        "prior_ptr": None if prior is None else prior.scale,
        "scale_ptr": scale,
        "scale_inv_ptr": scale_inv,
        "SIZE": amax.numel(),
        "CAST": quantize_launch.cast_to(format),
        "THROUGH": quantize_launch.INPUTS[through],
        "HEADROOM": 1.0 if prior is None else 2.0**prior.margin,
        "BLOCK": SCALES,
    }
    programs = quantize_launch.cdiv(amax.numel(), SCALES)
    return launch.Launch(multi_tensor.scales_of_many, programs, arguments, {"num_warps": 4})


def _amaxes(matrices: list[ShardInTable], table: torch.Tensor, aligned: bool) -> "Launch":
    from f8sub.kernels.triton import launch, multi_tensor

    rows: list[int] = []
    counts: list[int] = []
    for matrix in matrices:
        fields, programs = _fields(matrix)
        rows += [fields[0], sum(counts), *fields[1:]]
        counts.append(programs)
    device = matrices[0].data.device
    indices = torch.arange(len(matrices), dtype=torch.int32, device="cpu")
    # One entry for each program: which matrix it reads.
    of_program = indices.repeat_interleave(torch.tensor(counts, dtype=torch.int64, device="cpu"))
    arguments = {
        "matrices_ptr": sent_to(device, rows),
        "matrix_of_program_ptr": sent_to(device, of_program),
        # There is an atomic maximum of integers, as which the bits of amaxes order.
        "amax_ptr": table.view(torch.int32),
        "BLOCK": BLOCK,
        "SPAN": SPAN,
        "PART": EDGE,
        "ALIGNED": aligned,
    }
    return launch.Launch(multi_tensor.amaxes_of_many, sum(counts), arguments, {"num_warps": 4})


def _fields(matrix: ShardInTable) -> tuple[list[int], int]:
    """Return the numbers that the kernel reads of a matrix, without its first program; and its count of programs."""
    data, tile, offset, entry, entry_stride = matrix
    (rows, cols), stride = data.shape, data.stride(0)
    where = [data.data_ptr(), _DTYPES[data.dtype]]
    if matrix.is_of_lines:
        if tile.is_whole and data.is_contiguous():
            # One amax for all: a contiguous matrix is one long row, in which no program has a short end but the last.
            rows, cols = 1, data.numel()
        entry_stride = 0 if tile.is_whole else entry_stride
        return [*where, rows, cols, stride, 0, 0, 0, 0, entry, entry_stride], rows * -(-cols // SPAN)
    before = [start % edge for start, edge in zip(offset, (tile.rows, tile.cols), strict=True)]
    parts = -(-(before[0] + rows) // EDGE)
    parts *= -(-(before[1] + cols) // tile.cols) * (tile.cols // EDGE)
    fields = [*where, rows, cols, stride, tile.rows, tile.cols, *before, entry, entry_stride]
    return fields, parts


def _is_aligned(matrix: ShardInTable) -> bool:
    """Return whether all that a program reads begins at a multiple of 16 bytes, and is as many whole ones."""
    fields, _ = _fields(matrix)
    address, _, rows, cols, stride, _, _, _, cols_before, *_ = fields
    in_lines = cols % 16 == 0 and cols_before % 16 == 0 and (rows == 1 or stride % 16 == 0)
    return address % 16 == 0 and in_lines
