"""Layer 1. RMSNorm, forward and backward, as torch and transformers have it, operator by operator."""

from typing import NamedTuple

import torch


class Norm(NamedTuple):
    """Which RMSNorm it is.

    Attributes:
        eps: added to the mean of the squares.
        rounds: whether the normalized elements are rounded to x's dtype before the weight multiplies them, as in
            transformers' Llama; ``torch.nn.RMSNorm`` multiplies in float32.
    """

    eps: float
    rounds: bool


def rstd_of(x: torch.Tensor, eps: float) -> torch.Tensor:
    """``1 / sqrt(mean(x**2) + eps)`` over the last dimension: float32, (..., 1)."""
    return torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)


def normalize(x: torch.Tensor, weight: torch.Tensor, norm: Norm, rstd: torch.Tensor) -> torch.Tensor:
    """``x * rstd * weight``, rounded to x's dtype where the module rounds.

    Args:
        x: (..., N), bfloat16 or float16.
        weight: (N,), of x's dtype.
        norm: which one.
        rstd: float32, (..., 1).
    """
    normalized = x.to(torch.float32) * rstd
    if norm.rounds:
        return weight * normalized.to(x.dtype)
    return (normalized * weight).to(x.dtype)


def by_torch(x: torch.Tensor, weight: torch.Tensor, norm: Norm) -> torch.Tensor:
    """What the module makes in eager code: by the one operator that torch has, where it has one."""
    if norm.rounds:
        return normalize(x, weight, norm, rstd_of(x, norm.eps))
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, norm.eps)


def normalize_backward(
    dh: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: Norm,
    rstd: torch.Tensor,
    needs: tuple[bool, bool] = (True, True),
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x and of the weight, bitwise autograd's for the same rstd.

    Args:
        dh: (..., N), of x's dtype.
        x: see ``normalize``.
        weight: likewise.
        norm: likewise.
        rstd: likewise.
        needs: which gradients are read.
    """
    if x.is_cuda and not norm.rounds and not torch.compiler.is_compiling():
        # What autograd runs there.
        dx, dweight = torch.ops.aten._fused_rms_norm_backward.default(
            dh, x, [x.shape[-1]], rstd, weight, list(needs)
        )
        return dx if needs[0] else None, dweight if needs[1] else None
    in_float32 = x.to(torch.float32)
    if not norm.rounds:
        dh = dh.to(torch.float32)
    dx = dweight = None
    if needs[1]:
        normalized = (in_float32 * rstd).to(x.dtype) if norm.rounds else in_float32 * rstd
        dweight = (dh * normalized).sum_to_size(weight.shape).to(weight.dtype)
    if needs[0]:
        dnormalized = (dh * weight).to(torch.float32)
        drstd = (dnormalized * in_float32).sum(-1, keepdim=True)
        dmean = -0.5 * drstd * rstd.pow(3)
        dx = (dnormalized * rstd + dmean.expand_as(x) / x.shape[-1] * (2.0 * in_float32)).to(x.dtype)
    return dx, dweight
