"""The specification itself: amax, scale, cast and derivation, tile by tile, against float64; and four-bit codes."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from f8sub import ALL, Float8Format, Rounding, ScaleRule, Tile
from f8sub.formats import E2M1
from f8sub.kernels import fp4, reference, scales
from tests import oracle
from tests.budgets import excess
from tests.data_sets import gaussian, generator, lognormal, make, spread_columns
from tests.specs import STORED_AS, spec_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INF, NAN = float("inf"), float("nan")
TILES = {
    "tensorwise": Tile(ALL, ALL),
    "rowwise": Tile(1, ALL),
    "by-column": Tile(ALL, 1),
    "128x128": Tile(128, 128),
    "1x128": Tile(1, 128),
    "128x1": Tile(128, 1),
    "256x256": Tile(256, 256),
    "1x32": Tile(1, 32),
    "3x5": Tile(3, 5),
}
SHAPES = [(130, 300), (16, 32), (1, 129), (257, 1), (0, 16)]
on_each_tile = pytest.mark.parametrize("tile", TILES.values(), ids=list(TILES))
on_each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
on_each_rule = pytest.mark.parametrize("rule", list(ScaleRule), ids=[rule.value for rule in ScaleRule])
ONE_LEVEL = [rule for rule in ScaleRule if rule is not ScaleRule.TWO_LEVEL]
on_each_dtype = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@on_each_shape
@on_each_tile
def test_amax_is_that_of_the_finite_elements_of_each_tile(tile, shape, dtype):
    x = lognormal(shape, generator(1)).to(dtype)
    if x.numel():
        x.view(-1)[::7], x.view(-1)[3::50], x.view(-1)[5::61] = 0.0, NAN, -INF
    found = scales.amax(x, tile)
    edges = spec_of(Float8Format(E4M3, tile)).tile
    expected = oracle.largest_of_tiles(oracle.to_numpy(x.abs().nan_to_num(posinf=0.0)), edges)
    if not x.numel():
        expected = np.zeros(tile.scale_shape(shape))
    assert found.dtype == torch.float32
    assert np.array_equal(found.numpy(), expected)
    assert tile.scale_shape(shape) == expected.shape


def matrices(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Of each shape; and one with elements that are not finite, beside others and alone in their tiles."""
    for shape in SHAPES[:3]:
        yield make("lognormal", shape, 3)
    if dtype != E2M1:  # which has no NaN: test_against_casts.py
        x = gaussian((40, 160), generator(5))
        x[3, 4], x[7, 150], x[39, 0] = INF, -INF, NAN
        x[8:12] = NAN
        yield x


@on_each_rule
@pytest.mark.parametrize("dtype", [E4M3, E5M2, E2M1], ids=["e4m3", "e5m2", "e2m1"])
@on_each_tile
def test_codes_and_scales_are_the_oracles(tile, dtype, rule):
    format = Float8Format(dtype, tile, rule)
    for x in matrices(dtype):
        row, col, _ = reference.quantize(x, format, format)
        for operand, matrix in ((row, x), (col, x.t())):
            expected = oracle.quantize(oracle.to_numpy(matrix), spec_of(format))
            assert expected.differences(operand) == []
            assert operand.shape == expected.codes.shape
            assert operand.data.is_contiguous()
            assert operand.scale_inv.dtype == STORED_AS[rule]
            assert operand.scale_inv.stride() == torch.empty(operand.scale_inv.shape).stride()
            back = reference.dequantize(operand, torch.float32)
            assert np.array_equal(back.numpy(), expected.values.astype(np.float32), equal_nan=True)


@pytest.mark.long
def test_amaxes_of_another_shape_by_code_on_disk(tmp_path, monkeypatch):
    """Inductor (2.13) finds code of a matrix that is one tile wide for one of two; it read past the end of that."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    tile = Tile(128, 128)
    for shape in ((128, 32), (127, 129)):
        torch._dynamo.reset()
        x = gaussian((shape[0], 2 * shape[1]), generator(1))[:, : shape[1]]
        found = torch.compile(scales.amax, dynamic=True, fullgraph=True)(x, tile)
        assert torch.equal(found, scales.amax(x, tile))


@pytest.mark.parametrize("rule", ONE_LEVEL, ids=[rule.value for rule in ONE_LEVEL])
@on_each_dtype
def test_scales_of_every_power_of_two_amax(dtype, rule):
    amax = torch.tensor([math.ldexp(1.0, exponent) for exponent in range(-149, 128)])
    format = Float8Format(dtype, Tile(1, ALL), rule)
    scale = scales.scale_from_amax(amax, format)
    assert scale.isfinite().all()
    assert (scale > 0).all()
    assert scale.reciprocal().isfinite().all()
    assert np.array_equal(scale.numpy(), oracle.scale_of(amax.double().numpy(), spec_of(format)))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(bits=st.lists(st.integers(0, 0x7F7FFFFF), min_size=1, max_size=16), like=st.booleans())
def test_scales_of_two_levels_of_any_finite_amaxes(bits, like):
    """``like``: all of one magnitude, as in a matrix; else mostly far too small for the scale of the matrix."""
    if like:
        bits = [0x3F800000 + b % 0x2000000 for b in bits]
    amax = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    for dtype in (E2M1, E4M3):
        format = Float8Format(dtype, Tile(1, 16), ScaleRule.TWO_LEVEL)
        found, expected = (
            scales.scales_from_amax(amax, format),
            oracle.scales_of(amax.double().numpy(), spec_of(format)),
        )
        assert np.array_equal(found.scale.numpy(), expected.scale)
        assert np.array_equal(found.scale_inv.float().numpy(), expected.scale_inv)
        assert found.global_scale_inv.item() == expected.global_scale_inv
        assert (found.scale > 0).all()
        assert found.scale.isfinite().all()


def test_scales_of_tiles_that_are_near_ties():
    """3/64 of the matrix's amax is 21, between 20 and 22: a product in float32 decides one in nine the other way."""
    format = Float8Format(E2M1, Tile(1, 16), ScaleRule.TWO_LEVEL)
    for mantissa in range(128, 256):
        amax = mantissa * torch.tensor([[1.0, 3 / 64, 3 / 16]])
        found = scales.scales_from_amax(amax, format).scale_inv.float().numpy()
        assert np.array_equal(found, oracle.scales_of(amax.double().numpy(), spec_of(format)).scale_inv)


SHARDS = {
    "rows": [(0, 50, 0, 300), (50, 51, 0, 300), (51, 130, 0, 300)],
    "columns": [(0, 130, 0, 127), (0, 130, 127, 257), (0, 130, 257, 300)],
    "with-an-empty-one": [(0, 130, 0, 300), (130, 130, 0, 300)],
}


@pytest.mark.parametrize("cut", SHARDS, ids=list(SHARDS))
@on_each_tile
def test_shards_cast_with_the_whole_amax_give_the_whole_matrix(tile, cut):
    """shard_amax, first_tile and spread, together: tiles need not begin where a shard does."""
    x = spread_columns(lognormal((130, 300), generator(11)))
    format = Float8Format(E4M3, tile)
    amax = torch.zeros(tile.scale_shape((130, 300)))
    for top, bottom, left, right in SHARDS[cut]:
        if top == bottom:
            continue
        part = scales.shard_amax(x[top:bottom, left:right], tile, (top, left))
        row, col = scales.first_tile(tile, (top, left))
        view = amax[row : row + part.shape[0], col : col + part.shape[1]]
        view.copy_(torch.maximum(view, part))
    assert torch.equal(amax, scales.amax(x, tile))
    scale = scales.scale_from_amax(amax, format)
    whole = reference.quantize(x, format, None)[0].data.view(torch.uint8)
    for top, bottom, left, right in SHARDS[cut]:
        part = x[top:bottom, left:right]
        codes = reference.cast(part, reference.spread(scale, tile, part.shape, (top, left)), E4M3)
        assert torch.equal(codes.view(torch.uint8), whole[top:bottom, left:right])


@pytest.mark.parametrize("bad", [INF, NAN], ids=["inf", "nan"])
@on_each_tile
def test_a_shards_amax_tells_of_what_is_not_finite_and_where(tile, bad):
    x = gaussian((130, 300), generator(12))
    x[77, 200] = bad
    found = scales.shard_amax(x, tile, (0, 0))
    row, col = scales.first_tile(tile, (77, 200))
    assert found[row, col] == INF
    assert found.isinf().sum() == 1


@pytest.mark.parametrize("depth", [0, 1, 127, 128, 129, 300], ids=str)
@pytest.mark.parametrize("fast_accum", [True, False], ids=["one-sum", "promoted"])
def test_partial_sums(monkeypatch, depth, fast_accum):
    """Of 128 elements each, the last of what is left; exactly one where the accumulator keeps all of it."""
    a, b = gaussian((5, depth), generator(1)), gaussian((7, depth), generator(2))
    add, depths = reference.add_partial_sum, []

    def counted(total, left, right):
        depths.append(left.shape[1])
        add(total, left, right)

    monkeypatch.setattr(reference, "add_partial_sum", counted)
    found = reference.matmul_nt(a, b, fast_accum)
    assert sum(depths) == depth
    assert len(depths) == (1 if fast_accum else max(1, -(-depth // 128)))
    assert found.shape == (5, 7)
    assert excess(found, oracle.Product(a.double().numpy(), b.double().numpy())) <= 1


DRAWS, CHANCE_OF_FAILURE = 4096, 1e-9


def grid() -> torch.Tensor:
    """Codes, ties and values in between."""
    return torch.linspace(-6.0, 6.0, 193)


def test_stochastic_rounding_goes_to_a_neighbour_and_is_right_on_average():
    """A draw is within one step of its neighbours: Hoeffding's bound on the mean of 4096 draws is 0.058 steps."""
    torch.manual_seed(0)
    exact = grid().double()
    drawn = fp4.values(fp4.cast(grid().expand(DRAWS, -1), Rounding.STOCHASTIC)).double()
    codes = torch.tensor(sorted(set(oracle.VALUES["e2m1"].tolist())), dtype=torch.float64)
    upper = codes[torch.searchsorted(codes, exact)]
    lower = codes[torch.searchsorted(codes, exact, right=True) - 1]
    assert ((drawn == lower) | (drawn == upper)).all()
    bound = math.sqrt(math.log(2 * exact.numel() / CHANCE_OF_FAILURE) / (2 * DRAWS))
    assert ((drawn.mean(0) - exact).abs() <= bound * (upper - lower)).all()
    nearest = fp4.values(fp4.cast(grid()[None], Rounding.NEAREST)).double()[0]
    assert ((nearest - exact).abs() > bound * (upper - lower)).any()


@pytest.mark.parametrize("draw", [0.0, 1 - 2.0**-24], ids=["least", "largest"])
def test_the_last_draws_carry_nowhere(monkeypatch, draw):
    """What a code is exactly stays, with its sign; float32 cannot hold the largest draw beside 2 or 3."""
    monkeypatch.setattr(torch, "rand_like", lambda like: torch.full_like(like, draw))
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(fp4.cast(fp4.values(codes), Rounding.STOCHASTIC), codes)
    between = torch.tensor([3.999, -3.999, 5.999, -5.999, 100.0, -torch.inf])
    drawn = fp4.values(fp4.cast(between, Rounding.STOCHASTIC))
    assert drawn.tolist() == ([3.0, -3.0, 4.0, -4.0] if draw else [4.0, -4.0, 6.0, -6.0]) + [6.0, -6.0]


def test_the_draws_are_of_torchs_generator_and_nearest_takes_none():
    x = gaussian((8, 64), generator(1))
    torch.manual_seed(3)
    first, second = (fp4.cast(x, Rounding.STOCHASTIC) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(fp4.cast(x, Rounding.STOCHASTIC), first)
    state = torch.get_rng_state()
    fp4.cast(x, Rounding.NEAREST)
    assert torch.equal(torch.get_rng_state(), state)
