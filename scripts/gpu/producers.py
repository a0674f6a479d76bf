"""What makes float8 codes of what it computes, SwiGLU forward and backward and RMSNorm, as ``quantizers`` times it.

Both usages of all results but h in forward, whose columnwise codes the backward makes. Where scales are of a whole
tensor an amax is found first and inputs are read twice; of whole lines SwiGLU's backward and norms do that, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from f8sub import Float8Format, Operand
from f8sub.kernels import normed, producers, reference
from f8sub.kernels.norms import Norm, normalize
from f8sub.kernels.producers import Wanted

FORMATS = ("tensorwise", "rowwise", "1x128", "128x128", "256x256")
BYTES = {"SwiGLU": 5.0, "dSwiGLU": 11.0, "RMSNorm": 6.0}
"""An element, of inputs in bf16 that are read once; a norm's x is read to be measured and to be cast."""
READ_AGAIN = {
    ("SwiGLU", "tensorwise"): 4.0,
    ("dSwiGLU", "tensorwise"): 6.0,
    ("dSwiGLU", "rowwise"): 6.0,
    ("RMSNorm", "rowwise"): 2.0,
}
NORM = Norm(1e-5, rounds=True)


class Given(NamedTuple):
    """What the kernels read.

    Attributes:
        dh: bfloat16, (M, N), as all of them.
        gate: likewise.
        up: likewise.
        scale: float32, (1, 1), that the forward would have found for h where a format has one scale.
    """

    dh: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, format: Float8Format) -> Given:
        """With the scale of a ``format`` that has one."""
        scale = producers.quantize_swiglu(gate, up, format).scale
        if scale is None:
            raise RuntimeError(f"{format} has more than one scale")
        return cls(dh, gate, up, scale)


Operands = tuple[Operand | None, ...]
Run = Callable[[Given], Operands]


def benches(formats: dict[str, Float8Format]) -> Iterator[tuple[str, Run, Run, float]]:
    """Name, what to run, what it is to equal, bytes an element."""
    makers = {"SwiGLU": swiglu, "dSwiGLU": swiglu_backward, "RMSNorm": norm}
    for which, make in makers.items():
        for name in FORMATS:
            moved = BYTES[which] + READ_AGAIN.get((which, name), 0.0)
            yield f"{which} {name}", *make(formats[name]), moved


def swiglu(format: Float8Format) -> tuple[Run, Run]:
    def ours(given: Given) -> Operands:
        return (producers.quantize_swiglu(given.gate, given.up, format).row,)

    def right(given: Given) -> Operands:
        return (reference.quantize(F.silu(given.gate) * given.up, format, None)[0],)

    return ours, right


def swiglu_backward(format: Float8Format) -> tuple[Run, Run]:
    def ours(given: Given) -> Operands:
        wanted = Wanted((format, format), (format, format), format)
        scale = given.scale if format.tile.is_whole else None
        found = producers.quantize_swiglu_backward(given.dh, given.gate, given.up, wanted, scale)
        return found.dgate.row, found.dgate.col, found.dup.row, found.dup.col, found.h_col

    def right(given: Given) -> Operands:
        gate, up = (tensor.detach().requires_grad_() for tensor in (given.gate, given.up))
        h = F.silu(gate) * up
        gradients = torch.autograd.grad(h, (gate, up), given.dh)
        made = [operand for gradient in gradients for operand in reference.quantize(gradient, format, format)]
        return *made, reference.quantize(h.detach(), None, format)[1]

    return ours, right


def norm(format: Float8Format) -> tuple[Run, Run]:
    def measured(x: torch.Tensor) -> tuple[torch.Tensor, normed.Measured]:
        weight = x[0]
        return weight, normed.measure(x, weight, NORM, producers.has_one_scale(format))

    def ours(given: Given) -> Operands:
        weight, found = measured(given.dh)
        return normed.quantize(given.dh, weight, NORM, found, (format, format), None)[:2]

    def right(given: Given) -> Operands:
        weight, found = measured(given.dh)
        return reference.quantize(normalize(given.dh, weight, NORM, found.rstd), format, format)

    return ours, right
