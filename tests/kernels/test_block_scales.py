"""Scales of blocks in the layouts that cuBLASLt documents, and the products that Blackwell makes of them.

Nothing here has such a GPU: a float64 stand-in for ``F.scaled_mm`` takes what ATen/native/cuda/ScaledBlas.cpp takes,
finds each scale by cuBLAS's formula, and refuses the rest. torch's own checks of shapes run on the meta device.
"""

import numpy as np
import pytest
import torch
from torch.nn.functional import ScalingType, SwizzleType

import f8sub
from f8sub import ALL, Float8Format, ScaleRule, Tile
from f8sub.formats import E2M1, Operand
from f8sub.kernels import reference
from f8sub.kernels.gemm import block_scales, scaled_mm
from tests.budgets import excess
from tests.data_sets import generator, row_outliers
from tests.kernels.products import E4M3, MX, NV, SMALL_BLOCK_PAIRS, operands, product
from tests.oracle import VALUES

TILES = {
    "1x128": (1, 128),
    "128x128": (128, 128),
    "256x256": (256, 256),
    "row": (1, ALL),
    "tensor": (ALL, ALL),
    "allx128": (ALL, 128),
}


@pytest.mark.parametrize("shape", [(272, 656), (13, 40), (1, 1), (1, 130), (256, 512)], ids=str)
@pytest.mark.parametrize(
    ("tile", "rows"),
    [(tile, rows) for tile in TILES.values() for rows in (1, 128) if rows == 1 or tile[0] != 1],
    ids=str,
)
def test_scales_of_blocks(tile, rows, shape):
    """What lies under each block is the scale of every element in it, in the layout that is asked for."""
    matrix = row_outliers(shape, generator(4))
    operand = reference.quantize(matrix, Float8Format(E4M3, Tile(*tile)), None)[0]
    found = block_scales.vectors(operand) if rows == 1 else block_scales.squares(operand)
    assert found.stride(0) == 1
    by_rows = found if rows == 1 else found.t()
    assert by_rows.shape[0] == (shape[0] + -shape[0] % 16 if rows == 1 else -(-shape[0] // 128))
    assert found.stride(1) == found.shape[0]
    assert found.shape[0] % (16 if rows == 1 else 4) == 0
    spread = by_rows.repeat_interleave(rows, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    expected = reference.spread(operand.scale_inv, Tile(*tile), matrix.shape).expand(shape)
    assert torch.equal(spread, expected)


@pytest.mark.parametrize(
    "shape", [(272, 656), (13, 40), (1, 1), (1, 130), (256, 512), (512, 1), (0, 5), (5, 0)], ids=str
)
@pytest.mark.parametrize("tile", TILES.values(), ids=str)
def test_scales_are_laid_out_where_their_strides_are_those_that_kernels_fill(tile, shape):
    format = Float8Format(E4M3, Tile(*tile))
    data = torch.zeros(shape, dtype=E4M3)
    filled = block_scales.empty_scale_inv(data, format, *shape)
    lines, blocks = filled.shape
    for scale_inv in (
        filled,
        torch.empty(lines, blocks),
        torch.empty(blocks, lines).t(),
        torch.empty(lines, blocks + 1)[:, :blocks],
        torch.empty(lines, 2 * blocks)[:, ::2],
    ):
        operand = Operand(data, scale_inv, format)
        assert block_scales.is_laid_out(operand) == (scale_inv.stride() == filled.stride())


@pytest.mark.parametrize("tile", TILES.values(), ids=str)
def test_flat_scales_are_the_same_memory(tile):
    format = Float8Format(E4M3, Tile(*tile))
    data = torch.zeros(272, 656, dtype=E4M3)
    scale_inv = block_scales.empty_scale_inv(data, format, 272, 656)
    scale_inv.copy_(torch.rand(scale_inv.shape))
    flat = block_scales.flat(Operand(data, scale_inv, format))
    assert flat.shape == (scale_inv.numel(),)
    found = block_scales.unflat(Operand(data, flat, format))
    assert torch.equal(found.scale_inv, scale_inv)
    assert found.scale_inv.stride() == scale_inv.stride()
    assert found.scale_inv.data_ptr() == scale_inv.data_ptr()
    assert block_scales.unflat(found) is found


def test_scales_that_are_laid_out_are_not_copied():
    matrix = row_outliers((272, 656), generator(4))
    operand = reference.quantize(matrix, Float8Format(E4M3, Tile(1, 128)), None)[0]
    scale_inv = block_scales.empty_scale_inv(matrix, operand.format, *operand.shape).copy_(operand.scale_inv)
    assert block_scales.vectors(operand._replace(scale_inv=scale_inv)) is scale_inv
    operand = reference.quantize(matrix[:, :512], Float8Format(E4M3, Tile(128, 128)), None)[0]
    assert block_scales.squares(operand).data_ptr() == operand.scale_inv.data_ptr()


PAIRS = SMALL_BLOCK_PAIRS | {
    "mxfp8-of-larger-tiles": (
        Float8Format(E4M3, Tile(1, 64), ScaleRule.E8M0),
        Float8Format(E4M3, Tile(32, ALL), ScaleRule.E8M0),
    ),
}
SHAPES = {
    "aligned": (128, 256, 128),
    "many-atoms": (272, 400, 656),
    "odd": (13, 7, 40),
    "one-block": (3, 5, 16),
    "one-row": (1, 130, 130),
}
on_each_pair = pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))
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
