"""Triton's kernels that make the columnwise usage of codes, interpreted on the CPU, equal the reference bitwise."""

from unittest import mock

import pytest
import torch

from f8sub import Float8Format, Operand
from f8sub.kernels import cuda, reference
from f8sub.kernels.quantize import derive_columnwise_in_backward
from f8sub.kernels.triton import support
from tests.data_sets import generator, make
from tests.kernels.interpreted import interpreted, launched
from tests.kernels.products import assert_same_bits
from tests.kernels.quantized import FORMATS, SHAPES, SMALL, on_each_walk, same_bits
from tests.selection import long_but


def rowwise_of(format: Float8Format, shape: tuple[int, int] = SMALL) -> Operand:
    return reference.quantize(make("gaussian", shape, 6), format, None)[0]


@on_each_walk
@interpreted
def test_the_columnwise_usage_of_codes(name, device):
    format = FORMATS[name]
    for shape in (*SHAPES, (33, 70), (544, 300)):
        rowwise = rowwise_of(format, shape)
        given = rowwise._replace(data=rowwise.data.to(device), scale_inv=rowwise.scale_inv.to(device))
        for any_layout in (False, True):
            found = derive_columnwise_in_backward(given, format, given.scale_inv, any_layout)
            same_bits(found, reference.derive_columnwise(rowwise, format, any_layout))


RECAST = [name for name, format in FORMATS.items() if format.tile in (support.ROWWISE, support.VECTOR)]


@pytest.mark.parametrize("name", long_but(["rowwise"], RECAST))
@interpreted
def test_every_code_under_many_scales(name, device):
    """Every code under scales from float32's smallest to NaN: subnormal values, 0, and those beyond float32's range."""
    format = FORMATS[name]
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(140, 2)
    codes[:, :256] = codes[:, torch.randperm(256, generator=generator(5))]
    codes[:, 300] = 0
    codes[:, 301] = 0x7F
    scale_inv = torch.rand(format.tile.scale_shape(codes.shape), generator=generator(6)) + 1.0
    exponents = torch.linspace(-149, 126, len(scale_inv)).round()[:, None]
    scale_inv = torch.ldexp(scale_inv.double(), exponents).float()
    whole, upper, last = slice(0, 140), slice(0, 70), slice(137, 140)
    for rows, poisoned in ((whole, True), (whole, False), (upper, False), (last, False)):
        some = scale_inv[rows].clone()
        if poisoned:
            some[3] = float("nan")
        rowwise = Operand(codes[rows].contiguous().view(format.dtype), some, format)
        right = reference.derive_columnwise(rowwise, format)
        on_device = rowwise._replace(data=rowwise.data.to(device), scale_inv=some.to(device))
        found = cuda.derive_columnwise(on_device, format)
        assert_same_bits(found._replace(data=found.data.cpu(), scale_inv=found.scale_inv.cpu()), right)


@pytest.mark.parametrize("name", [*RECAST, "tensorwise", "128x128", "256x256-e5m2"])
@interpreted
def test_which_kernels_derive_columns_without_a_matrix_of_values(name):
    """Torch's operators do nothing."""
    rowwise = rowwise_of(FORMATS[name])
    with mock.patch.multiple(reference, dequantize=None, transposed=None), launched() as found:
        cuda.derive_columnwise(rowwise, FORMATS[name])
    by_lines = ["amax_of_code_columns", "requantize_lines"]
    by_tile = {support.ROWWISE: by_lines, support.VECTOR: ["requantize_vectors"]}
    assert found == by_tile.get(FORMATS[name].tile, ["transpose_codes"])


@interpreted
def test_codes_that_begin_within_a_word():
    """Words cannot be read there: by torch's operators."""
    format = FORMATS["128x128"]
    rowwise = rowwise_of(format, (128, 256))
    memory = torch.empty(rowwise.data.numel() + 1, dtype=torch.uint8)[1:].view(format.dtype)
    codes = memory.view(rowwise.data.shape).copy_(rowwise.data)
    right = reference.derive_columnwise(rowwise, format)
    assert_same_bits(cuda.derive_columnwise(rowwise._replace(data=codes), format), right)
    assert_same_bits(right._replace(data=cuda.transpose(codes)), right)
