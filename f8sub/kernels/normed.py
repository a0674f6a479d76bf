"""Layer 1. RMSNorm and the cast of its result: measured first, then normalized and cast at once, never in bf16.

The specification is torch's own operators and then ``reference.quantize``. Given one and the same rstd every kernel
equals it bitwise; their sums of squares are in another order than torch's, so that rstd has other last bits.
"""

from types import ModuleType
from typing import NamedTuple

import torch

from f8sub.formats import Operand
from f8sub.kernels import fused, host, reference
from f8sub.kernels.delayed import PastScale
from f8sub.kernels.norms import Norm, normalize, rstd_of
from f8sub.kernels.producers import HALF, Formats, has_one_scale


class Measured(NamedTuple):
    """What is known of a matrix before its normalized elements are cast, all float32.

    Attributes:
        rstd: (M, 1).
        whole_amax: (1, 1), of the finite normalized elements, where there is one scale and it was asked for; else None.
            Amaxes of rows and columns are of tiles, whose rows' rstd is there by then: found when these are cast.
    """

    rstd: torch.Tensor
    whole_amax: torch.Tensor | None = None


def why_no_kernel(usages: Formats) -> str | None:
    """Why no kernel normalizes and casts so; None where one does."""
    formats = [format for format in usages if format is not None]
    if not formats:
        return "casts for one usage at least"
    if len(set(formats)) > 1:
        return f"casts both usages alike, not to {formats}"
    return fused.why_no_kernel(formats[0])


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernels read such a matrix and weight."""
    # ptxas 12.8 crashes on what Triton 3.6 makes of squares of one row.
    half = x.dtype in HALF and x.dtype is weight.dtype
    # Detached, a parameter is a plain tensor, as kernels take it.
    return half and fused.takes(x) and fused.takes(weight.detach()) and x.shape[0] > 1


def measure(x: torch.Tensor, weight: torch.Tensor, norm: Norm, needs_amax: bool) -> Measured:
    """rstd, and the amax of what is normalized with it; by a kernel where it takes them.

    Args:
        x: (M, N), bfloat16 or float16.
        weight: (N,), of x's dtype.
        norm: which one.
        needs_amax: whether it is asked for.
    """
    if takes(x, weight):
        with fused.device_of(x):
            found: Measured
            launch, found = _launch().measurement(x.contiguous(), weight.contiguous(), norm, needs_amax)
            launch.run()
        return found
    rstd = rstd_of(x, norm.eps)
    if not needs_amax:
        return Measured(rstd)
    h = torch.nan_to_num(normalize(x, weight, norm, rstd), nan=0.0, posinf=0.0, neginf=0.0)
    return Measured(rstd, reference.largest(h, fused.TENSORWISE))


def quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: Norm,
    measured: Measured,
    usages: Formats,
    past: PastScale | None = None,
) -> tuple[Operand | None, Operand | None, torch.Tensor | None]:
    """``normalize(x, weight, norm, measured.rstd)``, cast, row-major; by a kernel where it takes them.

    Args:
        x: see ``measure``.
        weight: likewise.
        norm: likewise.
        measured: what is known; an amax that the scale is of and that is not there is found first.
        usages: rowwise and columnwise format, ones that ``why_no_kernel`` has no reason against.
        past: the scale of the result's past amaxes, for a format with one scale; None for scales of its own.

    Returns:
        The rowwise operand, the columnwise one, and the largest magnitude, float32, (1, 1), where ``past`` is given.
    """
    format = usages[0] or usages[1]
    if format is not None and takes(x, weight):
        known = past is not None and past.is_known
        if has_one_scale(format) and measured.whole_amax is None and not known:
            measured = measure(x, weight, norm, needs_amax=True)._replace(rstd=measured.rstd)
        with fused.device_of(x):
            made = _launch().cast(x.contiguous(), weight.contiguous(), norm, measured, usages, past)
            for launch in made.launches:
                launch.run()
        return made.row, made.col, made.largest
    h = normalize(x, weight, norm, measured.rstd)
    by = host if type(h) is torch.Tensor and h.is_cpu else fused
    if past is None:
        return *by.quantize(h, *usages), None
    row, col, largest = by.quantize_delayed(h, past, *usages)
    return row, col, largest


def _launch() -> ModuleType:
    from f8sub.kernels.triton import norm_launch

    return norm_launch
