"""Amaxes of many matrices by one Triton launch, and the scales of all of them by another.

What no kernel takes is left to the caller.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch

from f8sub.formats import ALL, HIGH_PRECISION, Float8Format, Tile
from f8sub.kernels.scales import PriorScale
from f8sub.kernels.triton import quantize_cuda

if TYPE_CHECKING:
    from f8sub.kernels.triton.launcher import Launch


class Matrix(NamedTuple):
    """A part of a matrix, and where in a table of amaxes those of the tiles are that it touches.

    Attributes:
        data: (rows, cols), adjacent in a row.
        tile: the blocks of the whole matrix.
        offset: row and column of the whole matrix that the part begins at.
        entry: where the first touched tile's amax is.
        entry_stride: entries from one row of tiles to the next.
    """

    data: torch.Tensor
    tile: Tile
    offset: tuple[int, int]
    entry: int
    entry_stride: int

    @property
    def is_of_lines(self) -> bool:
        """Whether its rows have an amax each, or one for all of them."""
        return self.tile.cols == ALL and self.tile.rows in (1, ALL)


def takes(matrix: Matrix, device: torch.device) -> bool:
    """Whether the kernel takes a matrix for a table on ``device``."""
    data, tile = matrix.data, matrix.tile
    edges = tile.rows, tile.cols
    blocks = ALL not in edges and all(edge % quantize_cuda.EDGE == 0 for edge in edges)
    return (
        data.device == device
        and quantize_cuda.takes(data)
        and data.dtype in HIGH_PRECISION
        and data.stride(1) == 1
        and (matrix.is_of_lines or blocks)
    )


def amaxes(matrices: Sequence[Matrix], table: torch.Tensor) -> "list[Launch]":
    """What takes the amaxes of matrices whenever it is run, for as long as they stay where they are.

    Each tile's is the maximum with what is there of ``scales.shard_amax``: infinity where it holds NaN or infinity.

    Args:
        matrices: those that the kernel ``takes``.
        table: float32, (entries,), not negative.
    """
    return _launches().amaxes(matrices, table) if matrices else []


def takes_amaxes(amax: torch.Tensor, format: Float8Format, through: torch.dtype) -> bool:
    """Whether the kernel makes scales of a format of amaxes that are rounded to ``through``."""
    return (
        format.is_plain and through in HIGH_PRECISION and amax.is_contiguous() and quantize_cuda.takes(amax)
    )


def scales(
    amax: torch.Tensor,
    prior: PriorScale | None,
    scale: torch.Tensor,
    scale_inv: torch.Tensor,
    format: Float8Format,
    through: torch.dtype,
) -> "Launch":
    """What writes the scales of amaxes that the kernel takes, ``scales.scales_or_nan``: NaN where one is infinite.

    Args:
        amax: float32, not negative; is rounded to ``through``.
        prior: scales of ``amax``'s size that cover it; None for current scaling.
        scale: float32, of ``amax``'s size, contiguous; is written.
        scale_inv: likewise.
        format: see ``takes_amaxes``.
        through: likewise.
    """
    launch: Launch = _launches().scales(amax, prior, scale, scale_inv, format, through)
    return launch


def _launches() -> ModuleType:
    from f8sub.kernels.triton import table_launch

    return table_launch
