"""SwiGLU's two quotients, of one reciprocal and without a branch: IEEE's, for every gate of half precision there is."""

import numpy as np
import pytest
import torch

from tests.kernels.interpreted import interpreter, needs_triton  # noqa: F401

HALF = (torch.bfloat16, torch.float16)
NEAREST_ALONE = 2.0 - 2.0**-23
"""A divisor whose reciprocal lies so near to the middle of two numbers that it is made of the nearest one alone."""


def all_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float()


def same(found: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Where the bits are, or both are NaN."""
    bits = torch.int32 if found.dtype == torch.float32 else torch.int16
    return (found.view(bits) == right.view(bits)) | (found.isnan() & right.isnan())


def check(off: int) -> None:
    """With reciprocals that are so many last bits off the nearest, as a GPU's may be by one."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from tests.kernels.quotients import quotients

    def divided(self, a, b):
        nearest = a.data / b.data
        moved = np.where(
            (nearest != 0) & np.isfinite(nearest), nearest.view(np.int32) + off, nearest.view(np.int32)
        )
        return TensorHandle(moved.view(np.float32), a.dtype.scalar)

    before, InterpreterBuilder.create_precise_divf = InterpreterBuilder.create_precise_divf, divided
    try:
        for dtype in HALF:
            gate = all_of(dtype)
            silu, sigmoid = quotients(gate)
            divisor = 1.0 + torch.exp(-gate)
            assert bool(same(silu.to(dtype), (gate / divisor).to(dtype)).all())
            alike = same(sigmoid, 1.0 / divisor)
            assert bool(alike[divisor != NEAREST_ALONE].all())
            assert off or bool(alike.all())
            assert bool((divisor == NEAREST_ALONE).any())
    finally:
        InterpreterBuilder.create_precise_divf = before


@needs_triton
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_every_gate_has_the_quotients_of_ieee(interpreter, off):  # noqa: F811
    interpreter(check, off)
