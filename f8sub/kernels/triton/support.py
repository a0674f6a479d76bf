"""Decides which devices, formats and tensors the kernels take, and describes parts of matrices that one launch casts.

No kernel is imported here: triton need not be installed.
"""

import contextlib
import functools
import importlib.util
from typing import NamedTuple

import torch

from f8sub.formats import ALL, HIGH_PRECISION, Float8Format, Tile

EDGE = 128
"""Edge of the tiles that kernels work on; the length of a vector, and a divisor of the edge of every square."""

ALIGNMENT = 16
"""Bytes. Triton compiles anew for pointers that are no multiple of it. Source: its ``native_specialize_impl``."""

STEP_SPAN = 1024
"""Elements that a program of AdamW's kernel steps."""

TENSORWISE, ROWWISE, VECTOR = Tile(ALL, ALL), Tile(1, ALL), Tile(1, EDGE)
EXPONENT_VECTOR = Tile(1, 32)
PAIRED_SQUARES = 128, 256
"""Edges of the squares that kernels of pairs take."""

OLDEST = (8, 9)
"""The first compute capability whose instructions cast to e4m3, Ada's. Source: PTX ISA, cvt."""
OLDEST_WITH_PAIRS = (9, 0)
"""The first one that compares both halves of a word at once, Hopper's. Source: PTX ISA, max.s16x2."""


def why_no_kernel(format: Float8Format) -> str | None:
    """Return why no kernel casts to a format; None where one does."""
    if not format.is_plain:
        return f"casts to float8 with float32 scales of one level, not to {format}"
    tile = format.tile
    if tile in (TENSORWISE, ROWWISE, VECTOR) or (tile.rows == tile.cols and tile.rows % EDGE == 0):
        return None
    return f"has tiles of a matrix, a row, 1x{EDGE} and squares of whole {EDGE}s, not {tile}"


def has_scale_per_expert(format: Float8Format, rows: int) -> bool:
    """Return whether one scale serves so many whole rows of a matrix, which has no others: rowwise codes alone."""
    tile = format.tile
    return format.is_plain and tile.cols == ALL and tile.rows not in (1, ALL) and rows % tile.rows == 0


@functools.cache
def why_no_triton(device: torch.device) -> str | None:
    """Return why there are no kernels for a device; None where there are."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"runs on NVIDIA's GPUs, not on {device}"
    if importlib.util.find_spec("triton") is None:
        return "is not installed"
    from f8sub.kernels.triton import triton_compat

    if (reason := triton_compat.why_not()) is not None:
        return reason
    found = torch.cuda.get_device_capability(device)
    if found >= OLDEST:
        return None
    return f"needs SM {OLDEST[0]}.{OLDEST[1]} or newer to cast to float8, found {found[0]}.{found[1]}"


@functools.cache
def compares_pairs(device: torch.device) -> bool:
    """Return whether a GPU runs the kernels of pairs; True for other devices, where launches are only looked at."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= OLDEST_WITH_PAIRS


def takes(x: torch.Tensor) -> bool:
    """Return whether the kernels read a tensor: neither a fake one nor one without elements."""
    return (
        x.is_cuda
        and type(x) is torch.Tensor
        and not torch.compiler.is_compiling()
        and x.numel() > 0
        and why_no_triton(x.device) is None
    )


def device_of(x: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Make the device of ``x`` the current one, on which Triton launches."""
    if x.get_device() == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


class ShardSlice(NamedTuple):
    """A part of a matrix, with the arguments of ``cuda.cast_into`` for it.

    Attributes:
        x: (rows, cols).
        format: of the quantized data.
        through: the dtype that ``x`` is rounded to first.
        offset: the row and column of the matrix that the part begins at.
        scale: the scales of all tiles of the matrix.
        out_stride: bytes from one row of the result to the next.
    """

    x: torch.Tensor
    format: Float8Format
    through: torch.dtype
    offset: tuple[int, int]
    scale: torch.Tensor
    out_stride: int


def takes_slice(part: ShardSlice) -> bool:
    """Return whether a kernel casts a part together with others."""
    x, scale, format = part.x, part.scale, part.format
    return (
        takes(x)
        and x.is_contiguous()
        and x.dtype in HIGH_PRECISION
        and part.through in HIGH_PRECISION
        and format.is_plain
        and (format.tile.cols == ALL or (format.tile.cols % EDGE == 0 and part.offset[1] % EDGE == 0))
        and (scale.stride(-1) == 1 or scale.shape[-1] == 1)
    )
