"""How to cast a part of a weight for the wire: with scales that are known, or rows with scales of their own."""

import torch

from f8sub.formats import ALL, Float8Format
from f8sub.kernels.triton import casts, launch
from f8sub.kernels.triton.launcher import Launch
from f8sub.kernels.triton.support import EDGE

PART = 64, EDGE
"""Tiles of ``cast_part``."""


def part_cast(
    x: torch.Tensor,
    scale: torch.Tensor,
    format: Float8Format,
    offset: tuple[int, int],
    through: torch.dtype,
    out: torch.Tensor,
) -> Launch:
    """How to cast a part of a matrix with scales that are known, see ``quantize_cuda.cast_into``.

    Scales and ``out``, (M, N), are adjacent in a row. Tiles are all columns, or whole ``EDGE``s of them, and the part
    begins at the column of a whole one.
    """
    rows, cols = (None if edge == ALL else edge for edge in (format.tile.rows, format.tile.cols))
    arguments = {
        "x_ptr": x,
        "scale_ptr": scale,
        "out_ptr": out,
        "OUT_STRIDE": out.stride(0),
        "SCALE_STRIDE": scale.stride(0),
        "first_row": offset[0],
        "first_col": offset[1],
        "TILE_ROWS": rows,
        "TILE_COLS": cols,
        "CAST": launch.cast_to(format),
        "THROUGH": launch.INPUTS[through],
    }
    return launch.over(x, PART, casts.cast_part, arguments, launch.WARPS_8)


def rows_cast(
    x: torch.Tensor, format: Float8Format, through: torch.dtype, out: torch.Tensor, scale_inv: torch.Tensor
) -> Launch:
    """How to cast rows with scales of their own, see ``quantize_cuda.cast_rows_into``.

    ``x`` is contiguous, and ``out``, (M, N), is adjacent in a row.
    """
    rows, cols = x.shape
    arguments = {
        "x_ptr": x,
        "out_ptr": out,
        "scale_inv_ptr": scale_inv,
        "N": cols,
        "OUT_STRIDE": out.stride(0),
        "SCALE_STRIDE": scale_inv.stride(0),
        "CAST": launch.cast_to(format),
        "THROUGH": launch.INPUTS[through],
        "PART": launch.ROW_PART,
        "WHOLE": cols % launch.ROW_PART == 0,
    }
    return Launch(casts.cast_rows_with_scales, rows, arguments, launch.WARPS_8)
