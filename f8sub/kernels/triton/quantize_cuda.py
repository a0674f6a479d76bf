"""Quantizers of CUDA tensors: one Triton kernel for both usages, or two; the reference for everything else.

All of them are bitwise equal to the reference, so none is asked for by name.
"""

import contextlib
import functools
import importlib.util
from types import ModuleType

import torch

from f8sub.formats import ALL, HIGH_PRECISION, Float8Format, Operand, Tile
from f8sub.kernels import reference, scales
from f8sub.kernels.reference import Quantized
from f8sub.kernels.scales import PriorScale

EDGE = 128
"""Edge of the tiles that kernels work on; of all vectors of a block, and a divisor of every square's."""

TENSORWISE, ROWWISE, VECTOR = Tile(ALL, ALL), Tile(1, ALL), Tile(1, EDGE)

OLDEST = (8, 9)
"""The first compute capability whose instructions cast to e4m3, Ada's. Source: PTX ISA, cvt."""
OLDEST_WITH_PAIRS = (9, 0)
"""The first one that compares both halves of a word at once, Hopper's. Source: PTX ISA, max.s16x2."""


def why_no_kernel(format: Float8Format) -> str | None:
    """Why no kernel casts to a format; None where one does."""
    if not format.is_plain:
        return f"casts to float8 with float32 scales of one level, not to {format}"
    tile = format.tile
    if tile in (TENSORWISE, ROWWISE, VECTOR) or (tile.rows == tile.cols and tile.rows % EDGE == 0):
        return None
    return f"has tiles of a matrix, a row, 1x{EDGE} and squares of whole {EDGE}s, not {tile}"


def has_recast(rowwise: Float8Format, columnwise: Float8Format) -> bool:
    """Whether a kernel makes columns' codes of rows' codes under other scales: both of lines, or both of vectors."""
    tiles = rowwise.tile, columnwise.tile
    return rowwise.is_plain and columnwise.is_plain and tiles in ((ROWWISE, ROWWISE), (VECTOR, VECTOR))


@functools.cache
def why_no_triton(device: torch.device) -> str | None:
    """Why there are no kernels for a device; None where there are."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"runs on NVIDIA's GPUs, not on {device}"
    if importlib.util.find_spec("triton") is None:
        return "is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability >= OLDEST:
        return None
    return (
        f"needs SM {OLDEST[0]}.{OLDEST[1]} or newer to cast to float8, found {capability[0]}.{capability[1]}"
    )


@functools.cache
def compares_pairs(device: torch.device) -> bool:
    """Whether a GPU runs the kernels of pairs; said of what is no GPU, where launches are only looked at."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= OLDEST_WITH_PAIRS


def quantize(
    x: torch.Tensor,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    any_layout: bool = False,
    prior: PriorScale | None = None,
    amax: torch.Tensor | None = None,
) -> Quantized:
    """``reference.quantize``; goes there for tensors and formats that no kernel takes.

    Args:
        x: see ``reference.quantize``.
        rowwise: likewise.
        columnwise: likewise.
        any_layout: likewise.
        prior: likewise.
        amax: ``scales.amax`` of ``x`` where it is known; then both formats have one scale a matrix.
    """
    formats = [format for format in (rowwise, columnwise) if format is not None]
    if (
        x.dtype not in HIGH_PRECISION
        or not takes(x)
        or not formats
        or any(why_no_kernel(format) for format in formats)
        or (any_layout and prior is not None)
    ):
        known = None if amax is None else lambda own, tile: amax
        return reference.quantize(x, rowwise, columnwise, any_layout, prior, known)
    if any_layout and _share_a_cast(formats):
        row = quantize(x, formats[0], None, amax=amax).rowwise
        return _seen_both_ways(row, rowwise, columnwise)
    x, largest = x.contiguous(), None
    with device_of(x):
        if prior is None:
            launches, row, col = _launch().quantization(x, rowwise, columnwise, amax)
        else:
            (launches, row, col), largest = _launch().quantization_with_prior(x, prior, rowwise, columnwise)
        for launch in launches:
            launch.run()
    return Quantized(row, col, largest)


def stage(amax: torch.Tensor, staged: torch.Tensor, met: torch.Tensor) -> None:
    """``scales.stage``; goes there for tensors that no kernel takes."""
    if not takes(amax):
        scales.stage(amax, staged, met)
        return
    with device_of(amax):
        _launch().staging(amax, staged, met).run()


def derive_columnwise(rowwise: Operand, columnwise: Float8Format) -> Operand:
    """``reference.derive_columnwise``; goes there for operands that no kernel takes."""
    codes = rowwise.data
    if not takes(codes) or why_no_kernel(columnwise):
        return reference.derive_columnwise(rowwise, columnwise)
    if not rowwise.format.tile.is_transpose_of(columnwise.tile):
        return _recast(rowwise, columnwise)
    if not _is_transposed_by_words(codes):
        return reference.transposed(rowwise, columnwise, any_layout=False)
    with device_of(codes):
        launch, derived = _recasting().derivation(rowwise, columnwise)
        launch.run()
    made: Operand = derived
    return made


def transpose(codes: torch.Tensor) -> torch.Tensor:
    """``torch.t_copy`` of float8 codes; goes there for what no kernel takes."""
    if not takes(codes) or not _is_transposed_by_words(codes):
        return torch.t_copy(codes)
    with device_of(codes):
        launch, transposed = _recasting().transposition(codes)
        launch.run()
    made: torch.Tensor = transposed
    return made


def _is_transposed_by_words(codes: torch.Tensor) -> bool:
    begins_at_a_word = codes.data_ptr() % 2 == 0
    return codes.is_contiguous() and codes.shape[0] % 2 == codes.shape[1] % 2 == 0 and begins_at_a_word


def cast_into(
    out: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    format: Float8Format,
    offset: tuple[int, int],
    through: torch.dtype,
) -> None:
    """Codes of a part of a matrix, with scales that are known; by the reference where no kernel takes them.

    Args:
        out: uint8, (rows, at least as many columns as the codes take); the rest is left alone.
        x: (rows, cols), any float dtype.
        scale: float32, of all of the matrix's tiles, in the shape that ``format`` has them.
        format: of the codes.
        offset: the row and column of the matrix that the part begins at.
        through: dtype that ``x`` is rounded to first.
    """
    tile = format.tile
    lies_under_one = tile.cols == ALL or (tile.cols % EDGE == 0 and offset[1] % EDGE == 0)
    if (
        x.dtype in HIGH_PRECISION
        and through in HIGH_PRECISION
        and takes(x)
        and format.is_plain
        and lies_under_one
        and (scale.stride(-1) == 1 or scale.shape[-1] == 1)
        and out.stride(-1) == 1
    ):
        with device_of(x):
            _launch().part_cast(x.contiguous(), scale, format, offset, through, out[:, : x.shape[1]]).run()
        return
    rounded = x.to(through)
    codes = reference.codes_as_stored(rounded, reference.spread(scale, tile, x.shape, offset), format)
    out[:, : codes.shape[1]] = codes.view(torch.uint8)


def takes(x: torch.Tensor) -> bool:
    """Whether the kernels read such a tensor: neither a fake one nor one of no elements."""
    return (
        x.is_cuda
        and type(x) is torch.Tensor
        and not torch.compiler.is_compiling()
        and x.numel() > 0
        and why_no_triton(x.device) is None
    )


def _recast(rowwise: Operand, columnwise: Float8Format) -> Operand:
    """The columnwise operand of codes whose scales are not its own."""
    derived: Operand | None
    if has_recast(rowwise.format, columnwise) and rowwise.data.is_contiguous():
        with device_of(rowwise.data):
            launches, _, derived = _recasting().recast(rowwise, columnwise)
            for launch in launches:
                launch.run()
    else:
        derived = quantize(reference.dequantize(rowwise, torch.float32), None, columnwise).columnwise
    if derived is None:
        raise RuntimeError("no columnwise operand was made of a rowwise one")
    return derived


def _share_a_cast(formats: list[Float8Format]) -> bool:
    """Whether one set of codes serves all usages."""
    return len(set(formats)) == 1 and formats[0].tile == formats[0].tile.t()


def _seen_both_ways(
    made: Operand | None, rowwise: Float8Format | None, columnwise: Float8Format | None
) -> Quantized:
    if made is None:
        raise RuntimeError("quantize returned no rowwise operand for a rowwise format")
    col = None if columnwise is None else reference.transposed(made, columnwise, any_layout=True)
    return Quantized(None if rowwise is None else made, col)


def _launch() -> ModuleType:
    from f8sub.kernels.triton import launch

    return launch


def _recasting() -> ModuleType:
    from f8sub.kernels.triton import recast_launch

    return recast_launch


def device_of(x: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Triton launches on the current device."""
    if x.get_device() == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)
