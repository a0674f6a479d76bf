"""Attention in float8 in float64, written down apart from the library: all heads at once, codes rounded by hand."""

import math
from typing import NamedTuple

import torch

E4M3 = (3, -6, 448.0)
E5M2 = (2, -14, 57344.0)
"""Bits of the mantissa, exponent of the smallest normal number, largest number."""

Kind = tuple[int, int, float]


class Scales(NamedTuple):
    """Of o, dP, dq, dk and dv; those of q, k, v and dO follow from their amax."""

    o: float
    dp: float = 1.0
    dq: float = 1.0
    dk: float = 1.0
    dv: float = 1.0


def rounded(x: torch.Tensor, kind: Kind) -> torch.Tensor:
    """To the nearest number of a float8 dtype, ties to even, saturated; float64."""
    bits, smallest, top = kind
    exponent = torch.frexp(x).exponent.double() - 1
    step = torch.exp2(exponent.clamp(min=smallest) - bits)
    return (torch.round(x / step) * step).clamp(-top, top)


def scaled(x: torch.Tensor, scale: float, kind: Kind = E4M3) -> torch.Tensor:
    """What x becomes in float8 with a scale."""
    return rounded(x * scale, kind) / scale


def current(x: torch.Tensor, kind: Kind = E4M3) -> torch.Tensor:
    """What x becomes in float8 with the scale of its own amax."""
    return scaled(x, kind[2] / (x.abs().max().item() or kind[2]), kind)


def expand(x: torch.Tensor, group: int) -> torch.Tensor:
    return x.repeat_interleave(group, 1)


def collect(x: torch.Tensor, group: int) -> torch.Tensor:
    return x.unflatten(1, (-1, group)).sum(2)


class Attention:
    """o, and dq, dk, dv of a cotangent; (batch, heads, rows, width) in float64."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scales: Scales):
        self.group, self.factor, self.scales = q.shape[1] // k.shape[1], q.shape[3] ** -0.5, scales
        self.q = current(q.double())
        # The mean over the rows, in the dtype of k.
        k = k - k.double().mean(2, keepdim=True).to(k.dtype)
        self.k, self.v = (expand(current(x.double()), self.group) for x in (k, v))
        s = torch.einsum("bhid,bhjd->bhij", self.q, self.k) * self.factor
        if causal:
            i, j = torch.arange(s.shape[2])[:, None], torch.arange(s.shape[3])[None]
            s = torch.where(j <= i, s, -math.inf)
        largest = s.max(-1, keepdim=True).values
        p = torch.exp(s - largest)
        total = p.sum(-1, keepdim=True)
        self.p = p / total
        self.o = scaled(scaled(p, 448.0) @ self.v / total, scales.o)

    def backward(self, do: torch.Tensor, kind: Kind) -> tuple[list[torch.Tensor], list[float]]:
        """dq, dk and dv; and the amaxes of dP, dq, dk and dv before they were rounded."""
        dy = current(do.double(), kind)
        p = scaled(self.p, 448.0)
        dv = collect(torch.einsum("bhij,bhid->bhjd", p, dy), self.group)
        of_v = torch.einsum("bhid,bhjd->bhij", dy, self.v)
        dp = self.factor * self.p * (of_v - (dy * self.o).sum(-1, keepdim=True))
        codes = scaled(dp, self.scales.dp, kind)
        dq = codes @ self.k
        dk = collect(torch.einsum("bhij,bhid->bhjd", codes, self.q), self.group)
        made = [scaled(x, getattr(self.scales, name)) for x, name in ((dq, "dq"), (dk, "dk"), (dv, "dv"))]
        return made, [x.abs().max().item() for x in (dp, dq, dk, dv)]


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, causal: bool
) -> list[torch.Tensor]:
    """o, dq, dk and dv without float8."""
    x = [t.detach().double().requires_grad_() for t in (q, k, v)]
    o = torch.nn.functional.scaled_dot_product_attention(*x, is_causal=causal, enable_gqa=True)
    return [o.detach(), *torch.autograd.grad(o, x, do.double())]
