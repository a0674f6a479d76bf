"""Parts of matrices that one launch casts: what is told of each, and which there is a kernel for."""

from typing import NamedTuple

import torch

from f8sub.formats import ALL, HIGH_PRECISION, Float8Format
from f8sub.kernels.triton import support
from f8sub.kernels.triton.support import EDGE


class Part(NamedTuple):
    """A part of a matrix, and what ``quantize_cuda.cast_into`` is told of it.

    Attributes:
        x: (rows, cols).
        format: of the codes.
        through: the dtype that ``x`` is rounded to first.
        offset: the row and column of the matrix that the part begins at.
        scale: the scales of all tiles of the matrix.
        out_stride: bytes from one row of codes to the next.
    """

    x: torch.Tensor
    format: Float8Format
    through: torch.dtype
    offset: tuple[int, int]
    scale: torch.Tensor
    out_stride: int


def takes(part: Part) -> bool:
    """Whether a kernel casts a part together with others."""
    x, scale, format = part.x, part.scale, part.format
    return (
        support.takes(x)
        and x.is_contiguous()
        and x.dtype in HIGH_PRECISION
        and part.through in HIGH_PRECISION
        and format.is_plain
        and (format.tile.cols == ALL or (format.tile.cols % EDGE == 0 and part.offset[1] % EDGE == 0))
        and (scale.stride(-1) == 1 or scale.shape[-1] == 1)
    )
