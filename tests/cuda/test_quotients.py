"""Quotients without a branch are IEEE's with a GPU's reciprocals: scales of all amaxes, inverses of all scales."""

import pytest

from tests.kernels.test_quotients import binade, right_scales, same

pytest.importorskip("triton")


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
