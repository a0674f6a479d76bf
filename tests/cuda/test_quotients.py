"""Quotients without a branch are IEEE's with a GPU's reciprocals: scales of all amaxes, inverses of all scales."""

import pytest
import torch

from tests.kernels.test_quotients import all_of, binade, right_scales, same

pytest.importorskip("triton")

HALF = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("top", [448.0, 57344.0])
def test_every_amax_has_the_scale_of_ieee(top):
    from tests.kernels.quotients import scales

    for exponent in range(-127, 128):
        amax = binade(exponent).cuda()
        assert bool(same(scales(amax, top, 4096), right_scales(amax, top)).all()), exponent


def test_every_scale_has_the_inverse_of_ieee():
    from tests.kernels.quotients import inverses

    for exponent in range(-126, 127):
        scale = binade(exponent)[: 1 if exponent == 126 else None].cuda()
        assert bool(same(inverses(scale, 4096), scale.double().reciprocal().float()).all()), exponent


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_gate_has_the_quotients_of_ieee(dtype):
    """Those of the divisor that CUDA's exponential gives."""
    from tests.kernels.quotients import quotients

    gate = all_of(dtype).cuda()
    made = [quotients(part) for part in gate.split(4096)]
    silu, sigmoid = (torch.cat(parts) for parts in zip(*made, strict=True))
    divisor = 1.0 + torch.exp(-gate)
    assert bool(same(silu.to(dtype), (gate / divisor).to(dtype)).all())
    assert bool(same(sigmoid, 1.0 / divisor).all())
