"""Layer 4. RMSNorm whose result is cast by those that read it: it goes to memory in float8 alone.

x --measure--> rstd, and an amax where there is one scale
x, rstd --normalize and quantize--> what q, k, v or gate and up read      saved for backward: x, rstd, and those codes
sum of their dx, x, rstd --> dx and the weight's gradient
"""

from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from f8sub.kernels import normed, producer_ops
from f8sub.kernels.normed import Measured
from f8sub.kernels.norms import Norm, normalize_backward, rstd_of
from f8sub.kernels.producers import HALF
from f8sub.tensor.normed_tensor import Made, NormedTensor
from f8sub.torch_compat import apply, autocast_dtype


class Measuring(NamedTuple):
    """What a norm does in forward, and for whom.

    Attributes:
        eps: the norm's, as text: see the note on numbers in ``kernels/reference.py``.
        rounds: see ``Norm``.
        needs_amax: whether its readers' scale is made of its amax in every step; delayed scaling's is of the past.
    """

    eps: str
    rounds: bool
    needs_amax: bool

    @classmethod
    def of(cls, norm: Norm, needs_amax: bool) -> "Measuring":
        """What this norm does."""
        return cls(repr(norm.eps), norm.rounds, needs_amax)

    @property
    def norm(self) -> Norm:
        """Which RMSNorm it is."""
        return Norm(float(self.eps), self.rounds)


class FusedNorm(torch.nn.Module):
    """An RMSNorm that leaves normalizing to those that read its result; made by ``fuse_producers``, by class swap.

    It runs as before where nothing will be differentiated, where something is to be seen of it (hooks, a forward that
    is wrapped, DTensors), where its input and weight are not both bfloat16 or both float16, and on a GPU that has no
    kernels.

    Attributes:
        measuring: what it does.
    """

    measuring: Measuring
    weight: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: D102
        if len(args) != 1 or kwargs or _runs_apart(self, args[0]):
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        result: torch.Tensor = apply(_Normalize, args[0], self.weight, self.measuring)
        return result

    def extra_repr(self) -> str:
        """What the module's own class says, and that it is fused."""
        return ", ".join(filter(None, (super().extra_repr(), "fused: norm -> float8")))


def _runs_apart(module: FusedNorm, x: torch.Tensor) -> bool:
    weight = module.weight
    if (
        not torch.is_grad_enabled()
        or x.dtype not in HALF
        or x.dtype is not weight.dtype
        or x.dim() == 0
        or x.size(-1) != weight.size(0)
        or autocast_dtype("cpu" if x.is_cpu else x.device.type) is not None
        or isinstance(x, DTensor | NormedTensor)
        or isinstance(weight, DTensor)
        or "forward" in module.__dict__
    ):
        return True
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        return True
    seen = x.is_cuda and not torch.compiler.is_compiling()
    return seen and not normed.takes(x.reshape(-1, x.shape[-1]), weight)


class _Normalize(torch.autograd.Function):
    """A norm that is made when it is read."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, how: Measuring) -> NormedTensor:
        measured = _measured(x, weight, how)
        ctx.save_for_backward(x, weight, measured.rstd)
        ctx.norm = how.norm
        result = NormedTensor(x.detach(), weight.detach(), measured, how.norm)
        if not torch.compiler.is_compiling():
            result.made = Made(x._version)
        return result

    @staticmethod
    def backward(ctx: Any, dh: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        rstd = rstd.view(*x.shape[:-1], 1)
        return *normalize_backward(dh, x, weight, ctx.norm, rstd, tuple(ctx.needs_input_grad[:2])), None


def _measured(x: torch.Tensor, weight: torch.Tensor, how: Measuring) -> Measured:
    rows = x.reshape(-1, x.shape[-1])
    if not torch.compiler.is_compiling():
        by_kernel = normed.takes(rows, weight)
        return normed.measure(rows, weight, how.norm, how.needs_amax and by_kernel)
    if not how.needs_amax:
        # By Inductor, in the kernel that makes x.
        return Measured(rstd_of(rows, how.norm.eps))
    return producer_ops.measure_normed(rows, weight, how.norm)
