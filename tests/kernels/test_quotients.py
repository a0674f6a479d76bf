"""Quotients without a branch are IEEE's: of amaxes and scales of all mantissas."""

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.kernels.interpreted import interpreted

AMAXES = [(exponent, 448.0) for exponent in (-127, -118, -117, 0)]
AMAXES += [(exponent, 57344.0) for exponent in (-112, -111, 127)]
"""Exponents of amaxes and the largest code: of subnormal ones, of the least that makes no scale above 2^126, of the
largest. The mantissas in between have the same quotients, with another exponent."""

SCALES = (-126, 0, 126)
"""Exponents of scales: the least and the largest there are, and one in between."""


def binade(exponent: int) -> torch.Tensor:
    """All float32 numbers with that exponent; -127 has the subnormal ones and 0."""
    return (torch.arange(1 << 23, dtype=torch.int32) + ((exponent + 127) << 23)).view(torch.float32)


def right_scales(amax: torch.Tensor, top: float) -> torch.Tensor:
    """A float64 quotient, rounded once; 1 of 0."""
    return torch.where(amax > 0, (top / amax.double()).clamp(max=2.0**126).float(), 1.0)


def same(found: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Where the bits are, or both are NaN."""
    bits = torch.int32 if found.dtype == torch.float32 else torch.int16
    return (found.view(bits) == right.view(bits)) | (found.isnan() & right.isnan())


@contextlib.contextmanager
def reciprocals(off: int) -> Iterator[None]:
    """So many last bits off the nearest ones, as a GPU's may be by one."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def divided(self, a, b):
        nearest = a.data / b.data
        moves, bits = (nearest != 0) & np.isfinite(nearest), nearest.view(np.int32)
        moved = np.where(moves, bits + off, bits)
        return TensorHandle(moved.view(np.float32), a.dtype.scalar)

    before, InterpreterBuilder.create_precise_divf = InterpreterBuilder.create_precise_divf, divided
    try:
        yield
    finally:
        InterpreterBuilder.create_precise_divf = before


@pytest.mark.long
@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize(("exponent", "top"), AMAXES)
@interpreted
def test_every_mantissa_has_the_scale_of_ieee(exponent, off, top):
    from tests.kernels.quotients import scales

    amax = binade(exponent)
    with reciprocals(off):
        assert bool(same(scales(amax, top), right_scales(amax, top)).all())


@pytest.mark.long
@pytest.mark.parametrize("off", [-1, 0, 1])
@pytest.mark.parametrize("exponent", SCALES)
@interpreted
def test_every_mantissa_has_the_inverse_of_ieee(exponent, off):
    from tests.kernels.quotients import inverses

    scale = binade(exponent)[: 1 if exponent == 126 else None]
    with reciprocals(off):
        wrong = ~same(inverses(scale), scale.double().reciprocal().float())
    # Of all ones the nearest reciprocal alone will do, which GPUs have: tests/cuda/test_quantize_cuda.py.
    assert not wrong[scale.view(torch.int32) & 0x7FFFFF != 0x7FFFFF].any()
    assert off or not wrong.any()
