"""Tile, Float8Format and the rule of what can be derived: pure data, refused where it makes no sense."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import f8sub
from f8sub import ALL, Float8Format, Rounding, ScaleRule, Tile
from f8sub.formats import E2M1, why_not_derivable

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
POW2 = ScaleRule.POWER_OF_2


EDGE, LIKE = "positive number of elements or ALL", r"like 'e4m3\[1x128,power_of_2\]'|edge"
WRONG = {
    **{
        f"tile {edges}": (lambda edges=edges: Tile(*edges), EDGE)
        for edges in ((0, 1), (1, 0), (-2, 128), (128, -3), (1, 2.5), ("1", 128), (True, 1))
    },
    **{
        str(dtype): (lambda dtype=dtype: Float8Format(dtype, Tile(ALL, ALL)), str(dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.uint8)
    },
    "no tile": (lambda: Float8Format(E4M3, (1, 128)), "takes a Tile, got"),
    "no rule": (lambda: Float8Format(E4M3, Tile(1, 128), "power_of_2"), "takes a ScaleRule, got"),
    "no rounding": (lambda: Float8Format(E4M3, Tile(1, 128), rounding="nearest"), "takes a Rounding, got"),
    **{
        f"hadamard {size}": (
            lambda size=size: Float8Format(E2M1, Tile(1, 16), hadamard=size),
            f"power of two as size, got {size}",
        )
        for size in (0, 1, 3, -2, 24)
    },
    **{
        f"stochastic {dtype}": (
            lambda dtype=dtype: Float8Format(dtype, Tile(1, 16), rounding=Rounding.STOCHASTIC),
            "stochastic rounding is defined for",
        )
        for dtype in (E4M3, E5M2)
    },
    **{
        f"name {name}": (lambda name=name: Float8Format.parse(name), LIKE)
        for name in ("", "e4m3", "e4m3[128]", "e4m3[1x-1]", "e3m4[1x32]", "e4m3[1x32,float]x")
    },
    "name of a transform": (lambda: Float8Format.parse("e4m3[1x32,hadamard]"), LIKE),
    "name of no tile": (lambda: Float8Format.parse("e4m3[0x32]"), LIKE),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_format_is_refused(case):
    make, message = WRONG[case]
    with pytest.raises(f8sub.Float8ConfigError, match=message):
        make()


def test_the_errors_are_value_errors():
    assert issubclass(f8sub.Float8ConfigError, ValueError)
    assert issubclass(f8sub.Float8ShapeError, ValueError)
    assert issubclass(f8sub.Float8NumericsError, RuntimeError)
    assert issubclass(f8sub.Float8RankMismatchError, RuntimeError)


def test_a_transposed_tile_covers_the_transposed_matrix():
    tile = Tile(1, 128)
    assert tile.t() == Tile(128, 1)
    assert tile.t().t() == tile
    assert tile.t().scale_shape((300, 5)) == tuple(reversed(tile.scale_shape((5, 300))))


@st.composite
def formats(draw) -> Float8Format:
    edges = st.just(ALL) | st.integers(1, 1024)
    dtype = draw(st.sampled_from([E4M3, E5M2, E2M1]))
    rounding = draw(st.sampled_from(list(Rounding))) if dtype == E2M1 else Rounding.NEAREST
    tile, rule = Tile(draw(edges), draw(edges)), draw(st.sampled_from(list(ScaleRule)))
    return Float8Format(dtype, tile, rule, rounding, draw(st.sampled_from([None, 2, 16, 128])))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(formats(), formats())
def test_a_name_is_read_back_and_no_two_formats_share_one(one, other):
    assert Float8Format.parse(one.name) == one
    assert (one.name == other.name) == (str(one) == str(other)) == (one == other)


DERIVABLE = {
    "square-float": ((128, 128), ScaleRule.FLOAT, (128, 128), ScaleRule.FLOAT),
    "tensorwise-float": ((ALL, ALL), ScaleRule.FLOAT, (ALL, ALL), ScaleRule.FLOAT),
    "same-elements-transposed": ((1, 128), ScaleRule.FLOAT, (128, 1), ScaleRule.FLOAT),
    "rows-pow2": ((1, ALL), POW2, (1, ALL), POW2),
    "1x32-pow2": ((1, 32), POW2, (1, 32), POW2),
    "two-tiles-pow2": ((128, 128), POW2, (1, 32), POW2),
    "1x32-e8m0": ((1, 32), ScaleRule.E8M0, (1, 32), ScaleRule.E8M0),
    "square-two-level": ((16, 16), ScaleRule.TWO_LEVEL, (16, 16), ScaleRule.TWO_LEVEL),
}
NOT_DERIVABLE = {
    "rows-float": ((1, ALL), ScaleRule.FLOAT, (1, ALL), ScaleRule.FLOAT),
    "1x128-float": ((1, 128), ScaleRule.FLOAT, (1, 128), ScaleRule.FLOAT),
    "another-tile-float": ((128, 128), ScaleRule.FLOAT, (1, 128), ScaleRule.FLOAT),
    "rules-differ": ((1, ALL), POW2, (1, ALL), ScaleRule.FLOAT),
    "rows-two-level": ((1, 16), ScaleRule.TWO_LEVEL, (1, 16), ScaleRule.TWO_LEVEL),
}


@pytest.mark.parametrize("name", [*DERIVABLE, *NOT_DERIVABLE])
def test_what_is_derivable_without_rounding_twice(name):
    row, row_rule, col, col_rule = (DERIVABLE | NOT_DERIVABLE)[name]
    formats = Float8Format(E4M3, Tile(*row), row_rule), Float8Format(E4M3, Tile(*col), col_rule)
    reason = why_not_derivable(*formats)
    assert reason is None if name in DERIVABLE else "round twice" in reason


def test_another_dtype_is_not_derivable():
    square = Tile(128, 128)
    assert "dtypes differ" in why_not_derivable(Float8Format(E4M3, square), Float8Format(E5M2, square))
