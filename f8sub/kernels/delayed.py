"""Layer 1. Quantizing with a scale of the past: delayed scaling's part of the specification.

Like the reference, plain PyTorch on any device, eager or compiled; ``host.quantize_delayed`` equals it to the bit.
"""

from typing import NamedTuple

import torch

from f8sub.formats import Float8Format, Operand
from f8sub.kernels import reference
from f8sub.kernels.reference import Across, Scales


class PastScale(NamedTuple):
    """What a tensor's past amaxes say about its scale.

    Attributes:
        scale: float32; 0 where there is no past yet.
        margin: powers of two of headroom that a first scale leaves.
        covers: whether the scale is lowered to what the current amax needs, so that nothing saturates.
        is_known: whether ``scale`` is known not to be 0: then a cast need not wait for the current amax.
    """

    scale: torch.Tensor
    margin: float
    covers: bool
    is_known: bool = False


def scale_with_margin(amax: torch.Tensor, format: Float8Format, margin: float) -> torch.Tensor:
    """``reference.scale_from_amax`` of an amax ``2**margin`` times as large, which float64 holds; never 0."""
    return reference.scale_from_amax(amax.double() * 2.0**margin, format).clamp(
        min=reference.smallest_scale()
    )


def scale_now(past: PastScale, amax: torch.Tensor, format: Float8Format) -> torch.Tensor:
    """The scale to cast with, of the scale that the past amaxes gave and the current amax.

    Args:
        past: the scale of the past; where there is none the current amax makes it.
        amax: float32, finite, of ``past.scale``'s shape.
        format: the format to cast to.

    Returns:
        float32 scales, positive, finite and with a finite inverse.
    """
    scale = past.scale
    if not past.is_known:
        scale = torch.where(past.scale == 0, scale_with_margin(amax, format, past.margin), past.scale)
    if not past.covers:
        return scale
    return torch.where(amax == 0, scale, torch.minimum(scale, reference.scale_from_amax(amax, format)))


def scales_or_nan(amax: torch.Tensor, format: Float8Format, past: PastScale | None) -> Scales:
    """``reference.scales_or_nan``, or ``scale_now`` and NaN likewise for matrices with a past."""
    if past is None:
        return reference.scales_or_nan(amax, format)
    bad = amax.isinf()
    scale = scale_now(past, amax.masked_fill(bad, 0.0), format).masked_fill(bad, torch.nan)
    return Scales(scale, scale.double().reciprocal().float(), None)


def stage(amax: torch.Tensor, staged: torch.Tensor, met: torch.Tensor) -> None:
    """Take an amax into the largest of those before it; one that is not finite is remembered as that and left out.

    Args:
        amax: float32, one element, not negative.
        staged: float32, (), not negative; in place.
        met: float32, (): becomes 1 where ``amax`` is not finite; in place.
    """
    finite = amax.isfinite().view(())
    staged.copy_(torch.maximum(staged, torch.where(finite, amax.view(()), 0.0)))
    met.copy_(torch.maximum(met, (~finite).float()))


def quantize(
    x: torch.Tensor,
    past: PastScale,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    any_layout: bool = False,
    across: Across | None = None,
) -> tuple[Operand | None, Operand | None, torch.Tensor]:
    """Both operands of a high-precision matrix with one scale of its past amaxes; what that cannot hold saturates.

    Args:
        x: (rows, cols), any float dtype.
        past: the scale, (1, 1).
        rowwise: format of the operand stored as ``x``; None to leave it out.
        columnwise: format of the operand stored as ``x.t()``, equal to ``rowwise`` where both are given; None to
            leave it out.
        any_layout: see ``reference.quantize``.
        across: likewise.

    Returns:
        (rowwise, columnwise, amax): the last one float32, (1, 1), the largest magnitude of ``x``, of all parts where
        it is one; infinity or NaN where an element is.
    """
    format = rowwise or columnwise
    if format is None:
        raise RuntimeError("asked to quantize for no usage")
    amax, largest = reference.amax(x, format.tile), reference.largest(x, format.tile)
    if across is not None:
        # What a collective makes of NaN is its own.
        both = torch.stack((amax, largest.nan_to_num(nan=torch.inf, posinf=torch.inf)))
        amax, largest = across(both, format.tile).unbind()
    scale = scale_now(past, amax, format)
    operand = Operand(
        reference.codes_as_stored(x, scale, format), scale.double().reciprocal().float(), format
    )
    col = None if columnwise is None else reference.transposed(operand, columnwise, any_layout)
    return None if rowwise is None else operand, col, largest
