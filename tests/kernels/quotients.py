"""A kernel of SwiGLU's two quotients alone. Imported where Triton interprets its kernels."""

import torch
import triton
import triton.language as tl

from f8sub.kernels.triton.swiglu import silu_and_sigmoid


@triton.jit
def store_quotients(gate_ptr, silu_ptr, sigmoid_ptr, SIZE: tl.constexpr):
    """``silu_and_sigmoid`` of float32 elements."""
    at = tl.arange(0, SIZE)
    silu, sigmoid = silu_and_sigmoid(tl.load(gate_ptr + at))
    tl.store(silu_ptr + at, silu)
    tl.store(sigmoid_ptr + at, sigmoid)


def quotients(gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """silu and sigmoid of float32 elements, as many as a power of two."""
    silu, sigmoid = torch.empty_like(gate), torch.empty_like(gate)
    store_quotients[(1,)](gate, silu, sigmoid, gate.numel())
    return silu, sigmoid
