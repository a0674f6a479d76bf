"""Triton's quantizers of all experts' weights, interpreted on the CPU, equal the specification bitwise."""

import pytest
import torch

from f8sub import Float8Format, Tile
from f8sub.kernels import cuda
from f8sub.kernels.grouped import operands
from f8sub.kernels.grouped.operands import ExpertWeights
from tests.data_sets import make
from tests.kernels.interpreted import interpreted
from tests.kernels.products import assert_same_bytes
from tests.kernels.quantized import INF, NAN
from tests.kernels.test_quantize_groups import GROUP_FORMATS, WALKS, on_each_format_and_dtype
from tests.selection import long_but

SHAPES = [(3, 144, 80), (2, 256, 128), (5, 16, 272)]
on_each_format = pytest.mark.parametrize("name", long_but(WALKS, GROUP_FORMATS))


def weights(shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """With an outlier, elements that are not finite, and an expert of zeros."""
    w = make("lognormal", shape, 6, dtype)
    w[0, 3, 5], w[0, 4, 6], w[-1, 2, 1], w[-1, 15, 15] = NAN, INF, -INF, 3e4
    w[1] = 0
    return w


def both_same(found: ExpertWeights, right: ExpertWeights) -> None:
    assert found.format == right.format
    assert_same_bytes("codes", found.data, right.data.contiguous())
    assert_same_bytes("scales", found.scale_inv, right.scale_inv.contiguous())


@on_each_format_and_dtype
@interpreted
def test_each_experts_tiles_begin_anew(name, dtype, device):
    """Packed, and with experts that lie apart."""
    for shape in SHAPES:
        w, format = weights(shape, dtype), GROUP_FORMATS[name]
        right = operands.quantize_weights(w, format)
        apart = torch.cat([w, w], 1).to(device)[:, : shape[1]]
        otherwise = (apart, w.transpose(1, 2).contiguous().to(device).transpose(1, 2))
        for given in (w.to(device), *(otherwise if shape == SHAPES[0] else ())):
            both_same(cuda.quantize_experts(given, format), right)


@on_each_format
@interpreted
def test_columns_are_derived_of_each_experts_codes(name, device):
    for shape in (*SHAPES, (2, 544, 32)):
        format = GROUP_FORMATS[name]
        rowwise = operands.quantize_weights(weights(shape, torch.bfloat16), format)
        rowwise = rowwise._replace(data=rowwise.data.contiguous())
        given = ExpertWeights(rowwise.data.to(device), rowwise.scale_inv.to(device), format)
        derived = cuda.derive_columnwise_of_experts(given, format)
        both_same(derived, operands.derive_columnwise(rowwise, format))
        if name in ("tensorwise", "rowwise", "128x128", "256x256-e5m2"):
            assert derived.data.is_contiguous()


@interpreted
def test_all_experts_rows_as_one_matrix(device):
    w = weights((3, 144, 80), torch.bfloat16)
    whole = GROUP_FORMATS["tensorwise"]
    flat = Float8Format(whole.dtype, Tile(144, -1), whole.scale_rule)
    made = cuda.quantize(w.view(-1, 80).to(device), flat, None).rowwise
    right = operands.quantize_weights(w, whole)
    assert_same_bytes("codes", made.data, right.data.reshape(-1, 80))
    assert_same_bytes("scales", made.scale_inv, right.scale_inv.reshape(3, 1))
