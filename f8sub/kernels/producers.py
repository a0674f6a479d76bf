"""Layer 1. Kernels that make a tensor and cast it: SwiGLU and its backward, whose results no GEMM reads in bf16.

The specification is torch's own operators and then ``reference.quantize``; every kernel equals it bitwise.
"""

import itertools
from types import ModuleType
from typing import NamedTuple

import torch

from f8sub.formats import Float8Format, Operand
from f8sub.kernels import delayed, fused, host, reference
from f8sub.kernels.delayed import PastScale

HALF = (torch.bfloat16, torch.float16)
"""What the kernels take: between two of their operators torch rounds, which float32 would not."""

Formats = tuple[Float8Format | None, Float8Format | None]
"""Rowwise and columnwise; None for a usage nobody reads."""


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """What feeds the last layer of a feed-forward, as torch has it."""
    return torch.nn.functional.silu(gate) * up


def swiglu_backward(
    dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of gate and of up, as torch's autograd has them."""
    return torch.ops.aten.silu_backward(dh * up, gate), dh * torch.nn.functional.silu(gate)


class Activated(NamedTuple):
    """h, cast for the GEMM of forward.

    Attributes:
        row: the rowwise operand.
        scale: float32, (1, 1), what it was cast with, for a plain format with one scale; else None. With it the
            columns can be cast in backward and have the same scale.
        largest: float32, (1, 1), the largest magnitude, where the scale is of the past; else None.
    """

    row: Operand
    scale: torch.Tensor | None
    largest: torch.Tensor | None


class Cast(NamedTuple):
    """A gradient, cast; ``largest`` as in ``Activated``."""

    row: Operand | None
    col: Operand | None
    largest: torch.Tensor | None


class Gradients(NamedTuple):
    """What backward reads.

    Attributes:
        dgate: both operands of gate's gradient.
        dup: likewise of up's.
        h_col: h's columnwise operand; None where it was not asked for.
    """

    dgate: Cast
    dup: Cast
    h_col: Operand | None


class Wanted(NamedTuple):
    """How gradients are to be cast.

    Attributes:
        dgate: formats of gate's.
        dup: formats of up's.
        h_col: h's columnwise format; None to leave it out.
        pasts: scales of dgate's and dup's past amaxes; None for scales of their own.
    """

    dgate: Formats
    dup: Formats
    h_col: Float8Format | None
    pasts: tuple[PastScale, PastScale] | None = None


def quantize_swiglu(
    gate: torch.Tensor, up: torch.Tensor, rowwise: Float8Format, past: PastScale | None = None
) -> Activated:
    """``silu(gate) * up``, cast by rows; by one kernel or two where they take it.

    Args:
        gate: (M, N), any float dtype.
        up: likewise.
        rowwise: format of the codes.
        past: the scale of h's past amaxes, of a format with one scale; None for scales of its own.
    """
    if _takes(gate, up) and fused.why_no_kernel(rowwise) is None:
        with fused.device_of(gate):
            made = _launch().forward(gate.contiguous(), up.contiguous(), rowwise, past)
            for launch in made.launches:
                launch.run()
        return Activated(made.row, made.scale, made.largest)
    h = swiglu(gate, up)
    largest = scale = None
    if past is None:
        row = _quantize(h, rowwise, None)[0]
    else:
        row, _, largest = _quantize_delayed(h, past, rowwise, None)
    if has_one_scale(rowwise):
        amax = reference.amax(h, rowwise.tile)
        scale = (
            reference.scale_from_amax(amax, rowwise)
            if past is None
            else delayed.scale_now(past, amax, rowwise)
        )
    if row is None:
        raise RuntimeError("quantize returned no rowwise operand for a rowwise format")
    return Activated(row, scale, largest)


def has_one_scale(format: Float8Format) -> bool:
    """Whether ``Activated.scale`` is there."""
    return format.is_plain and format.tile.is_whole


def quantize_swiglu_backward(
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    wanted: Wanted,
    scale: torch.Tensor | None = None,
    any_layout: bool = False,
) -> Gradients:
    """The gradients of gate and up, cast for both usages, and h, cast by columns.

    Args:
        dh: (M, N), any float dtype; gate and up likewise.
        gate: see there.
        up: see there.
        wanted: formats and scales.
        scale: ``Activated.scale``; used where h's columns have the format of its rows.
        any_layout: see ``reference.quantize``.
    """
    if not any_layout and _takes(dh, gate, up) and why_no_kernel(wanted, scale) is None:
        with fused.device_of(gate):
            inputs = (dh.contiguous(), gate.contiguous(), up.contiguous())
            made = _launch().backward(inputs, wanted.dgate, wanted.h_col, scale, wanted.pasts)
            for launch in made.launches:
                launch.run()
        return Gradients(Cast(*made.dgate), Cast(*made.dup), made.h_col)
    dgate, dup = swiglu_backward(dh, gate, up)
    pasts = wanted.pasts or (None, None)
    # Up's first, as autograd has them: codes that are rounded at random are drawn in this order.
    up_cast = _cast(dup, wanted.dup, pasts[1], any_layout)
    gate_cast = _cast(dgate, wanted.dgate, pasts[0], any_layout)
    return Gradients(gate_cast, up_cast, _columns_of_h(gate, up, wanted.h_col, scale, any_layout))


def why_no_kernel(wanted: Wanted, scale: torch.Tensor | None) -> str | None:
    """Why no kernel makes all of it; None where one does."""
    if wanted.dgate != wanted.dup:
        return f"casts both gradients alike, not to {wanted.dgate} and {wanted.dup}"
    formats = [format for format in wanted.dgate if format is not None]
    if not formats:
        return "casts gradients for one usage at least"
    if len(set(formats)) > 1:
        return f"casts both usages alike, not to {formats}"
    h = wanted.h_col
    if h is not None and (h.tile != formats[0].tile or (scale is None and h.tile.is_whole)):
        return f"casts all of it by tiles of one shape, not {h} beside {formats[0]}"
    return next(filter(None, map(fused.why_no_kernel, itertools.chain(formats, [h] if h else []))), None)


def _takes(*tensors: torch.Tensor) -> bool:
    dtype = tensors[0].dtype
    return all(x.dtype is dtype and dtype in HALF and fused.takes(x) for x in tensors)


def _cast(x: torch.Tensor, formats: Formats, past: PastScale | None, any_layout: bool) -> Cast:
    if formats == (None, None):
        return Cast(None, None, None)
    if past is None:
        return Cast(*_quantize(x, *formats, any_layout), None)
    return Cast(*_quantize_delayed(x, past, *formats, any_layout))


def _columns_of_h(
    gate: torch.Tensor,
    up: torch.Tensor,
    format: Float8Format | None,
    scale: torch.Tensor | None,
    any_layout: bool,
) -> Operand | None:
    if format is None:
        return None
    h = swiglu(gate, up)
    if scale is None:
        return _quantize(h, None, format, any_layout)[1]
    known = PastScale(scale, 0.0, covers=False, is_known=True)
    return _quantize_delayed(h, known, None, format, any_layout)[1]


def _quantize(
    x: torch.Tensor, rowwise: Float8Format | None, columnwise: Float8Format | None, any_layout: bool = False
) -> tuple[Operand | None, Operand | None]:
    by = host.quantize if type(x) is torch.Tensor and x.is_cpu else fused.quantize
    return by(x, rowwise, columnwise, any_layout)


def _quantize_delayed(
    x: torch.Tensor,
    past: PastScale,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    any_layout: bool = False,
) -> tuple[Operand | None, Operand | None, torch.Tensor]:
    by = host.quantize_delayed if type(x) is torch.Tensor and x.is_cpu else fused.quantize_delayed
    return by(x, past, rowwise, columnwise, any_layout)


def _launch() -> ModuleType:
    from f8sub.kernels.triton import swiglu_launch

    return swiglu_launch
