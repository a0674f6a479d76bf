"""Casts, scales and histories around the kernels of attention: by launches that are prepared together, or by operators.

On a GPU each function is one look-up and a few launches, because working them out keeps the host longer than they run.
"""

from typing import NamedTuple

import torch

from f8sub.attention.problem import E4M3, Problem, as_matrix, like
from f8sub.attention.scaling import (
    HEADROOM,
    LARGEST,
    MARGIN,
    OF_1,
    BackwardScales,
    ForwardScales,
    backward_scales,
    factors_of_bounds,
    forward_scales,
    roll,
)
from f8sub.formats import HIGH_PRECISION, Float8Format, present
from f8sub.kernels.quantize import quantize
from f8sub.kernels.triton import support

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Remembered(NamedTuple):
    """Holds what a backward writes to, see ``AttentionState``: float32, (HISTORY, 4) and (4,)."""

    history: torch.Tensor
    saturated: torch.Tensor


def cast_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Three, ForwardScales]:
    """Return packed q, k and v in float8, as they lie, with scales of current amaxes, and the scales of a forward."""
    if support.takes(q) and q.dtype in HIGH_PRECISION:
        from f8sub.kernels.triton import attention_launch

        with support.device_of(q):
            q8, k8, v8, out = attention_launch.cast_forward((q, k, v), E4M3, HEADROOM, OF_1)
        return (q8, k8, v8), ForwardScales(out[:4], out[4:5], out[5:])
    (q8, of_q), (k8, of_k), (v8, of_v) = (_cast(x, E4M3) for x in (q, k, v))
    return (q8, k8, v8), forward_scales(of_q, of_k, of_v)


def cast_backward(
    problem: Problem, do: torch.Tensor, inverse: torch.Tensor, history: torch.Tensor, format: Float8Format
) -> tuple[torch.Tensor, torch.Tensor, BackwardScales]:
    """Return a packed dO in float8 and its inverse scale, and the scales of a backward, see ``backward_scales``."""
    if support.takes(do) and do.dtype in HIGH_PRECISION:
        from f8sub.kernels.triton import attention_launch

        numbers = (*factors_of_bounds(problem), format.max, MARGIN, OF_1, LARGEST)
        with support.device_of(do):
            do8, of_do, out = attention_launch.cast_backward((do, inverse, history), format, numbers)
        return do8, of_do, BackwardScales(out[:4], out[4:8], out[8:])
    do8, of_do = _cast(do, format)
    return do8, of_do, backward_scales(problem, inverse, of_do, history, format.max)


def finish_backward(
    grads: Three,
    scales: BackwardScales,
    amaxes: torch.Tensor,
    remembered: Remembered,
    top: float,
    dtype: torch.dtype,
) -> Three:
    """Return what float8 dq, dk and dv stand for, and remember the amaxes (4,) of the backward, see ``roll``."""
    if support.takes(amaxes):
        from f8sub.kernels.triton import attention_launch

        with support.device_of(amaxes):
            dq, dk, dv = attention_launch.finish_backward(
                grads, (scales.gradients, scales.inverse, amaxes, *remembered), top, OF_1, dtype
            )
        return dq, dk, dv
    roll(*remembered, amaxes, scales.gradients, top)
    dq, dk, dv = back(grads, scales.inverse[1:], dtype)
    return dq, dk, dv


def back(
    given: tuple[torch.Tensor, ...], inverse: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Return what packed e4m3 data stand for, as they lie; ``inverse``, float32, (n,), has the scale of each."""
    if support.takes(inverse):
        from f8sub.kernels.triton import attention_launch

        with support.device_of(inverse):
            return tuple(attention_launch.dequantized(given, inverse, dtype))
    # A code can stand for a little more than the largest number it was cast from.
    top = torch.finfo(dtype).max
    return tuple(
        (x.float() * scale).clamp(-top, top).to(dtype) for x, scale in zip(given, inverse, strict=True)
    )


def _cast(x: torch.Tensor, format: Float8Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float8 data in the shape and memory order of a packed x, and the inverse scale, (1, 1)."""
    made = present(quantize(as_matrix(x), format, None).rowwise)
    return like(made.data, x), made.scale_inv
