"""Triton's quantizers, interpreted on the CPU, equal the reference bitwise."""

import pytest
import torch

from f8sub import ALL, Float8Format, ScaleRule, Tile
from f8sub.formats import E2M1
from f8sub.kernels import cuda, reference, scales
from f8sub.kernels.gemm import block_scales
from f8sub.kernels.scales import PriorScale
from f8sub.kernels.triton import support
from f8sub.kernels.triton.support import ShardSlice
from f8sub.torch_compat import tensors_in_storage
from tests.data_sets import DATA_SETS, edge_values, gaussian, generator, make
from tests.kernels.interpreted import interpreted
from tests.kernels.products import assert_same_bits
from tests.kernels.quantized import (
    E4M3,
    E5M2,
    FORMATS,
    INF,
    NAN,
    POWER_OF_2,
    SHAPES,
    SMALL,
    check,
    check_priors,
    on_each_format,
    on_each_rule_and_dtype,
    on_each_walk,
    usages_of,
)
from tests.selection import long_but


def bad_elements(dtype: torch.dtype) -> list[torch.Tensor]:
    """Three that are not finite, and nothing that is."""
    some = make("gaussian", (24, 48), 2, dtype)
    some[3, 4], some[7, 9], some[20, 0] = NAN, INF, -INF
    none = torch.full_like(some, NAN)
    none[3] = INF
    return [some, none]


@on_each_rule_and_dtype
@interpreted
def test_data_sets_edge_values_and_elements_that_are_not_finite(name, dtype, device):
    format = FORMATS[name]
    some, none = bad_elements(dtype)
    data = [make(data, SMALL, 3, dtype) for data in DATA_SETS]
    for x in (*data, *edge_values(dtype).values(), some, none):
        check(x, format, format, device=device)
    codes = cuda.quantize(some.to(device), format, None)[0].data
    assert codes.float().isnan().sum() == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=["bf16"])
@on_each_walk
@interpreted
def test_shapes_that_tiles_do_not_divide(name, dtype, device):
    for x in (*(make("lognormal", shape, 5, dtype) for shape in SHAPES), *bad_elements(dtype)):
        for row, col in usages_of(name):
            check(x, row, col, device=device)


@interpreted
def test_rows_of_any_width(device):
    """A program holds rows of up to 2048 elements; longer ones are read twice."""
    from f8sub.kernels.triton import quantize_launch

    for cols in (1, 768, 2048, 2064, 4096):
        x = make("lognormal", (5, cols), 5, torch.bfloat16)
        x[1, cols - 1], x[3] = INF, NAN
        for name in ("rowwise", "rowwise-e5m2"):
            (one,) = quantize_launch.quantization(x, FORMATS[name], None).launches
            assert one.kernel.fn.__name__ == ("quantize_whole_rows" if cols <= 2048 else "quantize_rows")
            check(x, FORMATS[name], None, device=device)


@pytest.mark.parametrize("rule", [ScaleRule.FLOAT, POWER_OF_2], ids=["float", "power_of_2"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@interpreted
def test_scales_of_many_amaxes(dtype, rule):
    """Every exponent, with mantissas at the ends, around 1.75 (that of the largest codes) and in between."""
    drawn = torch.randint(0, 1 << 23, (8,), generator=generator(3)).tolist()
    mantissas = [0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFE, 0x7FFFFF, *drawn]
    bits = [(exponent << 23) | mantissa for exponent in range(255) for mantissa in mantissas]
    amaxes = torch.tensor(bits, dtype=torch.int32).view(torch.float32)[:, None]
    check(amaxes, Float8Format(dtype, Tile(1, 128), rule), None)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@interpreted
def test_every_bfloat16_is_cast_right(dtype):
    """All bfloat16 there are, under the scale 1."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    one = PriorScale(torch.ones(1, 1), 0.0, False)
    format = Float8Format(dtype, Tile(ALL, ALL))
    kinds = reference.quantize, cuda.quantize
    expected, found = (quantize(x, format, format, prior=one) for quantize in kinds)
    for ours, right in zip(found[:2], expected[:2], strict=True):
        assert_same_bits(ours, right)


PASTS = [("tensorwise", torch.bfloat16), ("tensorwise-e5m2", torch.float32), ("tensorwise", torch.float16)]


@pytest.mark.parametrize(("name", "dtype"), long_but(PASTS[:1], PASTS))
@interpreted
def test_scales_of_the_past(name, dtype, device):
    edge = edge_values(dtype)
    edges = (edge[name] for name in ("largest_among_gaussian", "smallest_subnormal"))
    usual = make("lognormal", SMALL, 4, dtype)
    spoiled = [usual.clone(), *edges]
    for x, bad in zip(spoiled, (INF, NAN, -INF), strict=True):
        x[2, 3] = bad
    check_priors(name, [usual, *spoiled], device)


@interpreted
def test_no_amax_is_looked_for_where_a_past_is_known():
    """Unless it is to cover the amax."""
    from f8sub.kernels.triton import quantize_launch

    x, scale, format = make("gaussian", SMALL, 4, torch.bfloat16), torch.ones(1, 1), FORMATS["tensorwise"]
    for covers, known in ((False, False), (False, True), (True, True)):
        plan = quantize_launch.quantization(x, format, format, PriorScale(scale, 0.0, covers, known))
        found = [each.kernel.fn.__name__ for each in plan.launches]
        assert found == ["amax_of_matrix"] * (covers or not known) + ["cast_with_one"]


def staging(device: str = "cpu") -> None:
    for amaxes in ([1.0, 3.0, 2.0], [2.0, INF, 1.0], [NAN], [0.0, 2.0**-149, NAN, 5.0], [-NAN, 7.0]):
        staged, met = torch.zeros(2, device=device).unbind()
        for amax in amaxes:
            cuda.stage(torch.full((1, 1), amax, device=device), staged, met)
        finite = [amax for amax in amaxes if abs(amax) < INF]
        assert staged.item() == max([0.0, *finite])
        assert met.item() == float(len(finite) < len(amaxes))


def test_amaxes_are_staged(interpreter):
    interpreter(staging)
    staging()


PARTS = [
    ((0, 0), (300, 272)),
    ((128, 0), (130, 272)),
    ((33, 0), (65, 272)),
    ((0, 128), (300, 144)),
    ((7, 40), (50, 90)),
]
"""Where a part begins and its shape; the last begins within tiles of columns."""


@pytest.mark.parametrize("dtype", [torch.float32], ids=["fp32"])
@on_each_walk
@interpreted
def test_parts_with_known_scales(name, dtype, device):
    """SliceCasts of a matrix under its scales, some of which are NaN, into rows that are longer."""
    format = FORMATS[name]
    matrix = make("lognormal", (300, 272), 8, dtype)
    scale = scales.scale_from_amax(scales.amax(matrix, format.tile), format)
    scale[-1, -1] *= NAN if scale.numel() > 1 else 2.0
    matrix[40, 44], matrix[41, 45], matrix[42, 46] = NAN, INF, -INF
    for (row, col), (rows, cols) in PARTS:
        part = matrix[row : row + rows, col : col + cols].contiguous()
        for through in {dtype, torch.bfloat16}:
            spread = reference.spread(scale, format.tile, part.shape, (row, col))
            right = reference.cast(part.to(through), spread, format.dtype)
            out = torch.full((rows, 304), 0xAB, dtype=torch.uint8, device=device)
            cuda.cast_into(out, part.to(device), scale.to(device), format, (row, col), through)
            assert (out[:, cols:] == 0xAB).all()
            found = out[:, :cols].cpu().view(format.dtype).float()
            torch.testing.assert_close(found, right.float(), rtol=0, atol=0, equal_nan=True)
            signs = found.signbit() ^ right.float().signbit()
            assert not (signs & ~found.isnan()).any()


@on_each_walk
@interpreted
def test_many_parts_at_once(name, device):
    """SliceCasts of matrices of two dtypes, of whole tiles and others, cast together and each by itself, twice."""
    format, given, right = FORMATS[name], [], []
    for seed, ((row, col), shape) in enumerate([*PARTS[:4], ((0, 0), (192, 256)), ((64, 0), (64, 384))]):
        for dtype in (torch.float32, torch.bfloat16):
            whole = make("lognormal", (row + shape[0], col + shape[1]), seed, dtype).to(device)
            whole[row, col] = NAN
            scale = scales.scale_from_amax(scales.amax(whole.nan_to_num(), format.tile), format)
            part = whole[row:, col:].contiguous()
            stride = shape[1] + seed % 2 * 16
            given.append(ShardSlice(part, format, torch.bfloat16, (row, col), scale, stride))
            right.append(torch.full((shape[0], stride), 0xAB, dtype=torch.uint8, device=device))
    sizes = [-(-each.numel() // 16) * 16 for each in right]
    memories = [torch.empty(sum(sizes), dtype=torch.uint8, device=device) for _ in range(2)]
    placed = [memory.split(sizes) for memory in memories]
    # The first bytes of each memory in its matrix's shape.
    here, there = ([m[: r.numel()].view(r.shape) for m, r in zip(of, right, strict=True)] for of in placed)
    groups = (slice(5), slice(5, 11), slice(11, None))
    casts = [(*cuda.cast_together(given[some], here[some]), some) for some in groups]
    for factor, outs in ((1.0, here), (-0.5, there)):
        for part, expected, out in zip(given, right, outs, strict=True):
            part.x.mul_(factor)
            out.fill_(0xAB)
            cuda.cast_into(expected, part.x, part.scale, format, part.offset, part.through)
        for cast, left, some in casts:
            held = tensors_in_storage(outs[0])
            cast(outs[some][0].view(-1))
            assert tensors_in_storage(outs[0]) == held
            for number in left:
                part, out = given[some][number], outs[some][number]
                cuda.cast_into(out, part.x, part.scale, part.format, part.offset, part.through)
        for expected, out in zip(right, outs, strict=True):
            assert torch.equal(out, expected)


@interpreted
def test_scales_of_vectors_are_laid_out_as_the_gemm_reads_them():
    x, format = gaussian((48, 400), generator(8)), FORMATS["1x128"]
    for operand in cuda.quantize(x, format, format)[:2]:
        assert operand.scale_inv.stride() == (1, operand.data.shape[0])
        given = block_scales.vectors(operand)
        assert given.untyped_storage().data_ptr() == operand.scale_inv.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", long_but(["tensorwise", "rowwise", "1x128"], FORMATS))
@interpreted
def test_other_layouts_and_two_formats(name):
    x, format = gaussian((48, 80), generator(8)), FORMATS[name]
    check(x.t(), format, format)
    check(x[::2], format, format)
    if name != "1x128-float":
        check(x, format, FORMATS["1x128-float"])
    for row, col in usages_of(name):
        check(x, row, col, any_layout=True)


UNCOVERED = {
    "32x32": Float8Format(E4M3, Tile(32, 32)),
    "128x256": Float8Format(E4M3, Tile(128, 256)),
    "1x64": Float8Format(E4M3, Tile(1, 64)),
    "columns": Float8Format(E4M3, Tile(ALL, 1)),
    "e8m0": Float8Format(E4M3, Tile(1, 128), ScaleRule.E8M0),
    "e2m1": Float8Format(E2M1, Tile(ALL, ALL)),
    "hadamard": Float8Format(E4M3, Tile(ALL, ALL), hadamard=16),
}


@pytest.mark.parametrize("name", UNCOVERED)
def test_what_no_kernel_casts_to(name):
    words = str(UNCOVERED[name]), str(UNCOVERED[name].tile)
    assert any(word in str(support.why_no_kernel(UNCOVERED[name])) for word in words)


@on_each_format
def test_the_cpu_has_no_kernels(name):
    """Neither asked for through the module nor chosen by a layer on the CPU."""
    assert support.why_no_kernel(FORMATS[name]) is None
    assert "cpu" in str(support.why_no_triton(torch.device("cpu")))
    x = gaussian(SMALL, generator(1))
    check(x, FORMATS[name], FORMATS[name])
    if FORMATS[name].tile.is_whole:
        check_priors(name, [x])
