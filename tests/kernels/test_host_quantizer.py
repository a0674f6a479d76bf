"""The host quantizer equals the reference bitwise: any shape, dtype and magnitude."""

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from f8sub import ALL, Float8Format, ScaleRule, Tile
from f8sub.formats import E2M1
from f8sub.kernels import quantize, reference, scales
from f8sub.kernels.scales import PriorScale
from tests.data_sets import DTYPES, gaussian, generator
from tests.kernels.products import E4M3, E5M2, assert_same_bits

FORMATS = {
    f"{name}-{rule.value}": Float8Format(dtype, Tile(ALL, ALL), rule)
    for name, dtype in (("e4m3", E4M3), ("e5m2", E5M2))
    for rule in (ScaleRule.FLOAT, ScaleRule.POWER_OF_2)
}
on_each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))

shapes = st.tuples(st.integers(1, 9), st.integers(1, 17))
formats = st.sampled_from(list(FORMATS.values()))
pasts = st.builds(
    lambda scale, covers: PriorScale(torch.full((1, 1), scale), 3, covers),
    st.sampled_from([0.0, 1e-30, 0.7, 3e20, 2.0**126]),
    st.booleans(),
)


def assert_same(x: torch.Tensor, row: Float8Format | None, col: Float8Format | None, prior=None) -> None:
    found, expected = (
        quantize(x, row, col, prior=prior) for quantize in (quantize.quantize_on_cpu, reference.quantize)
    )
    for ours, right in zip(found[:2], expected[:2], strict=True):
        assert_same_bits(ours, right)
        assert ours is None or ours.data.is_contiguous()
    torch.testing.assert_close(found[2], expected[2], rtol=0, atol=0, equal_nan=True)


@st.composite
def matrices(draw):
    """Any bits: subnormals, both zeros, NaN and infinity among them, or magnitudes around one exponent."""
    shape, dtype = draw(shapes), draw(st.sampled_from(list(DTYPES.values())))
    count, width = shape[0] * shape[1], dtype.itemsize
    if draw(st.booleans()):
        bits = draw(st.binary(min_size=count * width, max_size=count * width))
        return torch.frombuffer(bytearray(bits), dtype=dtype).view(shape)
    exponent = draw(st.integers(-149, 127))
    values = gaussian(shape, generator(draw(st.integers(0, 1000)))) * 2.0**exponent
    values[draw(st.integers(0, shape[0] - 1))] *= draw(st.sampled_from([0.0, -0.0, 1.0, 2.0**-20]))
    return values.to(dtype)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(x=matrices(), row=st.none() | formats, col=st.none() | formats, past=st.none() | pasts)
def test_quantize_is_the_references(x, row, col, past):
    assert_same(x, row, col, past)


@on_each_format
def test_scale_of_many_floats(format):
    """Every exponent with 64 mantissas, the first and the last among them."""
    mantissas = [0, 1, 0x7FFFFF, *torch.randint(0, 1 << 23, (61,), generator=generator(3)).tolist()]
    bits = [(exponent << 23) | m for exponent in range(255) for m in mantissas]
    amaxes = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    expected = scales.scale_from_amax(amaxes, format)
    found = [quantize.scale_from_amax(amax, format) for amax in amaxes.tolist()]
    assert found == expected.tolist()


ODD = {
    "one-scale-a-row": lambda x: (x, Float8Format(E4M3, Tile(1, ALL))),
    "blocks": lambda x: (x, Float8Format(E4M3, Tile(8, 8))),
    "transposed": lambda x: (x.t(), FORMATS["e4m3-float"]),
    "every-other-row": lambda x: (x[::2], FORMATS["e5m2-float"]),
    "no-rows": lambda x: (x[:0], FORMATS["e4m3-float"]),
    "no-columns": lambda x: (x[:, :0], FORMATS["e4m3-float"]),
    "e2m1": lambda x: (x, Float8Format(E2M1, Tile(ALL, ALL))),
    "e8m0": lambda x: (x, Float8Format(E4M3, Tile(ALL, ALL), ScaleRule.E8M0)),
    "two-level": lambda x: (x, Float8Format(E4M3, Tile(ALL, ALL), ScaleRule.TWO_LEVEL)),
    "hadamard": lambda x: (x, Float8Format(E4M3, Tile(ALL, ALL), hadamard=16)),
}


@pytest.mark.parametrize("name", ODD)
def test_what_it_is_not_for_goes_to_the_reference(name):
    x, format = ODD[name](gaussian((16, 32), generator(4)))
    for row, col in ((format, format), (format, None), (None, format), (FORMATS["e4m3-float"], format)):
        assert_same(x, row, col)


@pytest.mark.parametrize("mode", [FakeTensorMode, torch.inference_mode], ids=str)
def test_what_is_made_once_at_import_is_made_outside_of_modes(mode):
    spec = importlib.util.find_spec(quantize.__name__)
    module = importlib.util.module_from_spec(spec)
    with mode():
        spec.loader.exec_module(module)
    made = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
    assert len(made) == 2
    assert all(type(tensor) is torch.Tensor and not tensor.is_inference() for tensor in made)
