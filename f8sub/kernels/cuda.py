"""Quantizers of CUDA tensors: one Triton kernel for both usages, or two; the reference for everything else.

All of them are bitwise equal to the reference, so none is asked for by name.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch

from f8sub.formats import HIGH_PRECISION, Float8Format, Operand, present
from f8sub.kernels import reference
from f8sub.kernels.reference import Quantized
from f8sub.kernels.scales import PriorScale
from f8sub.kernels.triton import support
from f8sub.kernels.triton.support import ALIGNMENT, ROWWISE, VECTOR, ShardSlice, takes_slice, why_no_kernel
from f8sub.torch_compat import is_capturing

_RECAST = ((ROWWISE, ROWWISE), (VECTOR, VECTOR))
"""The tiles of rowwise codes and of columnwise ones between which a kernel casts anew."""


def quantize(
    x: torch.Tensor,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    any_layout: bool = False,
    prior: PriorScale | None = None,
    amax: torch.Tensor | None = None,
) -> Quantized:
    """``reference.quantize``; goes there for tensors and formats that no kernel takes.

    If ``amax`` is given, it is ``scales.amax`` of ``x``, and both formats have one scale a matrix.
    """
    formats = [format for format in (rowwise, columnwise) if format is not None]
    is_current = prior is None and amax is None
    in_bands = (
        is_current
        and rowwise is not None
        and columnwise is None
        and support.has_scale_per_expert(rowwise, len(x))
    )
    if (
        x.dtype not in HIGH_PRECISION
        or not support.takes(x)
        or not formats
        or not (in_bands or not any(why_no_kernel(format) for format in formats))
        or (any_layout and prior is not None)
    ):
        known = None if amax is None else lambda own, tile: amax
        return reference.quantize(x, rowwise, columnwise, any_layout, prior, known)
    if any_layout and len(set(formats)) == 1 and formats[0].tile == formats[0].tile.t():
        row = cast(Operand, quantize(x, formats[0], None, amax=amax).rowwise)
        col = None if columnwise is None else reference.transposed(row, columnwise, any_layout=True)
        return Quantized(None if rowwise is None else row, col)
    from f8sub.kernels.triton import launch, quantize_grouped_launch, quantize_launch

    x = x.contiguous()
    with support.device_of(x):
        if prior is not None:
            plan = quantize_launch.quantization(x, rowwise, columnwise, prior, amax)
            for one in plan.launches:
                one.run()
            return Quantized(*plan[1:4])
        tensors = launch.run(
            (rowwise, columnwise),
            (x, amax),
            lambda: (
                quantize_grouped_launch.quantization_of_stacked_weights(x, present(rowwise))
                if in_bands
                else quantize_launch.quantization(x, rowwise, columnwise, None, amax).made
            ),
        )
    return Quantized(
        None if rowwise is None else Operand(tensors[0], tensors[1], rowwise),
        None if columnwise is None else Operand(tensors[-2], tensors[-1], columnwise),
    )


def stage(amax: torch.Tensor, staged: torch.Tensor, met: torch.Tensor) -> None:
    """Raise ``staged`` to as many amaxes, in place; one that is not finite sets its ``met`` to 1. Float32."""
    if amax.numel() == 1 and support.takes(amax):
        from f8sub.kernels.triton import quantize_launch

        with support.device_of(amax):
            quantize_launch.staging(amax, staged, met).run()
        return
    amax = amax.view_as(staged)
    finite = amax.isfinite()
    staged.copy_(torch.maximum(staged, torch.where(finite, amax, 0.0)))
    met.copy_(torch.maximum(met, (~finite).float()))


def derive_columnwise(rowwise: Operand, columnwise: Float8Format) -> Operand:
    """``reference.derive_columnwise``; goes there for operands that no kernel takes."""
    codes = rowwise.data
    if not support.takes(codes) or why_no_kernel(columnwise):
        return reference.derive_columnwise(rowwise, columnwise)
    tiles = rowwise.format.tile, columnwise.tile
    if tiles[0].is_transpose_of(tiles[1]):
        if not _is_transposed_by_words(codes):
            return reference.transposed(rowwise, columnwise, any_layout=False)
    elif tiles not in _RECAST or not (rowwise.format.is_plain and codes.is_contiguous()):
        values = reference.dequantize(rowwise, torch.float32)
        return cast(Operand, quantize(values, None, columnwise).columnwise)
    if tiles[0].is_transpose_of(tiles[1]):
        rowwise = rowwise._replace(scale_inv=rowwise.scale_inv.contiguous())
    from f8sub.kernels.triton import launch, quantize_launch

    kind = rowwise.format, columnwise
    with support.device_of(codes):
        data, scale_inv = launch.run(
            kind, (codes, rowwise.scale_inv), lambda: quantize_launch.derivation(rowwise, columnwise).made
        )
    return Operand(data, scale_inv, columnwise)


def transpose(codes: torch.Tensor) -> torch.Tensor:
    """``torch.t_copy`` of float8 codes."""
    if not support.takes(codes) or not _is_transposed_by_words(codes):
        return torch.t_copy(codes)
    from f8sub.kernels.triton import launch, quantize_launch

    with support.device_of(codes):
        return launch.run("transposed", (codes,), lambda: quantize_launch.transposed(codes))[0]


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
        scale: float32, the scales of all tiles of the matrix, in the shape that ``format`` has them.
        format: the format of the codes.
        offset: the row and column of the matrix that the part begins at.
        through: the dtype that ``x`` is rounded to first.
    """
    part = ShardSlice(x.contiguous(), format, through, offset, scale, out.stride(0))
    if takes_slice(part) and out.stride(-1) == 1:
        from f8sub.kernels.triton import quantize_launch

        with support.device_of(x):
            quantize_launch.part_cast(part, out[:, : x.shape[1]]).run()
        return
    rounded = x.to(through)
    codes = reference.codes_as_stored(rounded, reference.spread(scale, format.tile, x.shape, offset), format)
    out[:, : codes.shape[1]] = codes.view(torch.uint8)


def cast_together(
    parts: Sequence[ShardSlice | None], outs: Sequence[torch.Tensor]
) -> tuple[Callable[[torch.Tensor], None] | None, list[int]]:
    """``cast_into`` of parts that few launches cast.

    Args:
        parts: each as ``cast_into`` takes it, if its ``x`` is contiguous; None for what is to be left.
        outs: a matrix of bytes for each, which may have more rows; all in one memory.

    Returns:
        What casts the parts as they are when it is called, into the same places of a memory that begins as ``outs[0]``
        does; it holds where the parts lie, and not the parts. None where kernels do not cast two of them together. And
        the numbers of the parts that it leaves to ``cast_into``.
    """
    begin = outs[0].data_ptr()
    offsets = [out.data_ptr() - begin for out in outs]
    # A replayed graph would read what is told of the parts from host memory that has become another tensor's.
    fits = begin % ALIGNMENT == 0 and not is_capturing(outs[0])
    taken = {
        number: part
        for number, part in enumerate(parts)
        if fits and part is not None and offsets[number] % ALIGNMENT == 0 and takes_slice(part)
    }
    if len(taken) < 2:
        return None, list(range(len(parts)))
    from f8sub.kernels.triton import quantize_launch

    made = quantize_launch.SliceCasts(list(taken.values()), [offsets[number] for number in taken])
    return made.run, [number for number in range(len(parts)) if number not in taken]


def _is_transposed_by_words(codes: torch.Tensor) -> bool:
    begins_at_a_word = codes.data_ptr() % 2 == 0
    return codes.is_contiguous() and codes.shape[0] % 2 == codes.shape[1] % 2 == 0 and begins_at_a_word
