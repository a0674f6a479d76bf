"""The products that Blackwell makes of scales of one byte.

Nothing here has such a GPU: a float64 stand-in for ``F.scaled_mm`` takes what ATen/native/cuda/ScaledBlas.cpp takes,
finds each scale by cuBLAS's formula, and refuses the rest. torch's own checks of shapes run on the meta device.
"""

import numpy as np
import pytest
import torch
from torch.nn.functional import ScalingType, SwizzleType

import f8sub
from f8sub.formats import E2M1
from f8sub.kernels import reference
from f8sub.kernels.gemm import scaled_mm
from tests.budgets import excess
from tests.data_sets import generator, row_outliers
from tests.kernels.products import E4M3, MX, NV, ONE_BYTE_PAIRS, operands, product
from tests.oracle import VALUES

SHAPES = {
    "aligned": (128, 256, 128),
    "many-atoms": (272, 400, 656),
    "odd": (13, 7, 40),
    "one-block": (3, 5, 16),
    "one-row": (1, 130, 130),
}
on_each_pair = pytest.mark.parametrize("pair", ONE_BYTE_PAIRS.values(), ids=list(ONE_BYTE_PAIRS))
on_each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))


def filled_up(rows: int, blocks: int) -> tuple[int, int]:
    return rows + -rows % 128, blocks + -blocks % 4


def unswizzled(scales: torch.Tensor, rows: int, blocks: int) -> np.ndarray:
    """float64 scale of each block, by cuBLAS's formula for the offset of one in the atoms of 128x4 bytes."""
    across = filled_up(rows, blocks)[1] // 4
    found = np.empty((rows, blocks))
    values = scales.double().numpy()
    for row in range(rows):
        for block in range(blocks):
            atom = (row // 128) * across + block // 4
            found[row, block] = values[atom * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + block % 4]
    return found


def elements(codes: torch.Tensor) -> np.ndarray:
    """float64 value of every code, two e2m1 in a byte with the first in the low half."""
    if codes.dtype != E2M1:
        return codes.double().numpy()
    packed = codes.contiguous().view(torch.uint8).numpy()
    return VALUES["e2m1"][np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)]


def blackwell(a, b, scale_a, kinds_a, scale_b, kinds_b, swizzles_a, swizzles_b, output_dtype):
    """``F.scaled_mm`` of Blackwell: its checks, torch's own of shapes and dtypes, and the product in float64."""
    on_meta = [[t.to("meta") for t in scales] for scales in (scale_a, scale_b)]
    made = torch.nn.functional.scaled_mm(
        *(a.to("meta"), b.to("meta"), on_meta[0], kinds_a, on_meta[1], kinds_b, swizzles_a, swizzles_b),
        output_dtype=output_dtype,
    )
    assert (made.shape, made.dtype) == ((a.shape[0], b.shape[1]), output_dtype)
    two_levels = a.dtype == E2M1
    per_byte = 2 if two_levels else 1
    size, stored, kind = (
        (16, E4M3, ScalingType.BlockWise1x16)
        if two_levels
        else (32, torch.float8_e8m0fnu, ScalingType.BlockWise1x32)
    )
    assert a.dtype == b.dtype == (E2M1 if two_levels else E4M3)
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert a.shape[1] == b.shape[0]
    assert a.shape[1] % 16 == 0  # bytes: rows begin where TMA can
    assert b.shape[1] % 16 == 0
    factor, values = 1.0, []
    for codes, scales, kinds, swizzles in (
        (a, scale_a, kinds_a, swizzles_a),
        (b.t(), scale_b, kinds_b, swizzles_b),
    ):
        assert kinds == [kind, ScalingType.TensorWise][: 1 + two_levels]
        assert swizzles == [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE][: 1 + two_levels]
        assert len(scales) == len(kinds)
        rows, blocks = codes.shape[0], -(-codes.shape[1] * per_byte // size)
        assert scales[0].dtype == stored
        assert scales[0].is_contiguous()
        assert scales[0].numel() == np.prod(filled_up(rows, blocks))
        spread = unswizzled(scales[0], rows, blocks).repeat(size, 1)
        if two_levels:
            assert scales[1].dtype == torch.float32
            assert scales[1].numel() == 1
            factor *= scales[1].item()
        found = elements(codes)
        values.append(found * spread[:, : found.shape[1]])
    return torch.from_numpy((values[0] @ values[1].T) * factor).to(output_dtype)


@on_each_shape
@on_each_pair
def test_what_blackwell_is_given(monkeypatch, pair, shape):
    monkeypatch.setattr(scaled_mm, "scaled_mm", blackwell)
    a, b = operands(pair, shape)
    for dtype in (torch.float32, torch.bfloat16):
        found = scaled_mm.gemm_nt(a, b, dtype, fast_accum=False)
        assert (found.shape, found.dtype) == (shape[:2], dtype)
        assert excess(found, product(a, b)) <= 1


@pytest.mark.parametrize("hadamard", [None, 16], ids=["plain", "hadamard"])
def test_a_hadamard_transform_cancels_on_blackwell_too(monkeypatch, hadamard):
    monkeypatch.setattr(scaled_mm, "scaled_mm", blackwell)
    recipe = f8sub.get_recipe("nvfp4", hadamard=hadamard is not None)
    a, b = operands((recipe.wgrad.a, recipe.wgrad.b), (48, 32, 64))
    native = scaled_mm.gemm_nt(a, b, torch.float32, fast_accum=False)
    expected = reference.gemm_nt(a, b, torch.float32, fast_accum=False)
    assert torch.allclose(native, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_a_tile_that_is_not_finite_stays_so(monkeypatch):
    """e2m1 has no NaN, so the tile's scale is; a row filled up beside it must not be."""
    monkeypatch.setattr(scaled_mm, "scaled_mm", blackwell)
    for format in (MX, NV):
        x = row_outliers((13, 64), generator(1)) / 300
        x[5, 40] = torch.nan
        a, b = operands((format, format), (13, 7, 64))
        a = reference.quantize(x, format, None)[0]
        found = scaled_mm.gemm_nt(a, b, torch.float32, fast_accum=False)
        assert torch.equal(found.isnan().any(1), torch.arange(13) == 5)
