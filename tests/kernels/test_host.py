"""The host quantizer equals the reference bitwise: any shape, dtype and magnitude."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from f8sub import ALL, Float8Format, ScaleRule, Tile
from f8sub.formats import E2M1
from f8sub.kernels import quantize, reference, scales
from tests.data_sets import edge_values, gaussian, generator

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {
    f"{name}-{rule.value}": Float8Format(dtype, Tile(ALL, ALL), rule)
    for name, dtype in (("e4m3", E4M3), ("e5m2", E5M2))
    for rule in (ScaleRule.FLOAT, ScaleRule.POWER_OF_2)
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
on_each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))
on_each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))

INTS = {2: torch.int16, 4: torch.int32}
shapes = st.tuples(st.integers(1, 9), st.integers(1, 17))
formats = st.sampled_from(list(FORMATS.values()))


def assert_same(x: torch.Tensor, rowwise: Float8Format | None, columnwise: Float8Format | None) -> None:
    found = quantize.quantize_on_cpu(x, rowwise, columnwise)
    expected = reference.quantize(x, rowwise, columnwise)
    for ours, right in zip(found, expected, strict=True):
        assert (ours is None) == (right is None)
        if ours is None:
            continue
        assert ours.format == right.format
        assert ours.data.dtype == right.data.dtype
        assert torch.equal(ours.data.view(torch.uint8), right.data.view(torch.uint8))
        assert torch.equal(ours.scale_inv.view(torch.int32), right.scale_inv.view(torch.int32))
        assert ours.scale_inv.shape == (1, 1)
        assert ours.data.is_contiguous()


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
@given(x=matrices(), row=st.none() | formats, col=st.none() | formats)
def test_quantize_is_the_references(x, row, col):
    assert_same(x, row, col)


@on_each_format
@on_each_dtype
def test_edge_values(dtype, format):
    for x in edge_values(dtype).values():
        assert_same(x, format, format)


@on_each_format
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=["nan", "inf", "-inf"])
def test_non_finite_elements(bad, format):
    x = gaussian((16, 32), generator(1))
    x[3, 5] = bad
    assert_same(x, format, format)
    assert quantize.quantize_on_cpu(x, format, None)[0].data.float().isnan().sum() == 1


@on_each_dtype
def test_two_formats_are_two_casts(dtype):
    x = gaussian((16, 32), generator(2)).to(dtype)
    assert_same(x, FORMATS["e4m3-float"], FORMATS["e5m2-float"])
    assert_same(x, FORMATS["e5m2-float"], FORMATS["e5m2-power_of_2"])


def as_float32(bits: int) -> float:
    return struct.unpack("f", struct.pack("I", bits))[0]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 0x7F7FFFFF), min_size=1, max_size=64), formats)
def test_scale_of_any_finite_amax(bits, format):
    amaxes = [as_float32(b) for b in bits]
    expected = scales.scale_from_amax(torch.tensor(amaxes), format)
    found = torch.tensor([quantize.scale_from_amax(amax, format) for amax in amaxes])
    assert torch.equal(found, expected)


@on_each_format
def test_scale_of_many_floats(format):
    """Every exponent with 64 mantissas, the first and the last among them."""
    mantissas = [0, 1, 0x7FFFFF, *torch.randint(0, 1 << 23, (61,), generator=generator(3)).tolist()]
    amaxes = [as_float32((exponent << 23) | m) for exponent in range(255) for m in mantissas]
    expected = scales.scale_from_amax(torch.tensor(amaxes), format)
    found = [quantize.scale_from_amax(amax, format) for amax in amaxes]
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


@pytest.mark.parametrize("name", ODD, ids=list(ODD))
def test_what_it_is_not_for_goes_to_the_reference(name):
    x, format = ODD[name](gaussian((16, 32), generator(4)))
    for formats in ((format, format), (format, None), (None, format), (FORMATS["e4m3-float"], format)):
        for found, expected in zip(
            quantize.quantize_on_cpu(x, *formats), reference.quantize(x, *formats), strict=True
        ):
            assert (found is None) == (expected is None)
            if found is not None:
                assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
                assert found.scale_inv.dtype == expected.scale_inv.dtype
                assert torch.equal(found.scale_inv.float(), expected.scale_inv.float())
                assert (found.global_scale_inv is None) == (expected.global_scale_inv is None)
                assert found.data.is_contiguous()
