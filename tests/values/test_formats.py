"""Tile, Float8Format and the rule of what can be derived: pure data, refused where it makes no sense."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import f8sub
from f8sub import ALL, Float8Format, ScaleRule, Tile
from f8sub.formats import E2M1, Rounding, why_not_derivable

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
POW2 = ScaleRule.POWER_OF_2


@pytest.mark.parametrize(
    "edges", [(0, 1), (1, 0), (-2, 128), (128, -3), (1, 2.5), ("1", 128), (True, 1)], ids=str
)
def test_a_tile_edge_is_positive_or_all(edges):
    with pytest.raises(f8sub.Float8ConfigError, match="positive number of elements or ALL"):
        Tile(*edges)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_a_format_has_a_float8_dtype(dtype):
    with pytest.raises(f8sub.Float8ConfigError, match=str(dtype)):
        Float8Format(dtype, Tile(ALL, ALL))


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"tile": (1, 128)}, "Tile"),
        ({"scale_rule": "power_of_2"}, "ScaleRule"),
        ({"rounding": "nearest"}, "Rounding"),
    ],
    ids=["tile", "scale-rule", "rounding"],
)
def test_the_parts_of_a_format_have_their_types(wrong, kind):
    with pytest.raises(f8sub.Float8ConfigError, match=f"takes a {kind}, got"):
        Float8Format(E4M3, **{"tile": Tile(1, 128), **wrong})


def test_the_errors_are_value_errors():
    assert issubclass(f8sub.Float8ConfigError, ValueError)
    assert issubclass(f8sub.Float8ShapeError, ValueError)
    assert issubclass(f8sub.Float8NumericsError, RuntimeError)
    assert issubclass(f8sub.Float8RankMismatchError, RuntimeError)


SCALE_SHAPES = {
    "tensorwise": ((ALL, ALL), (33, 48), (1, 1)),
    "rowwise": ((1, ALL), (33, 48), (33, 1)),
    "columns": ((ALL, 1), (33, 48), (1, 48)),
    "1x128-ragged": ((1, 128), (5, 300), (5, 3)),
    "128x128-ragged": ((128, 128), (129, 128), (2, 1)),
    "1x32": ((1, 32), (2, 64), (2, 2)),
    "larger-than-the-matrix": ((256, 256), (16, 16), (1, 1)),
    "no-rows": ((1, ALL), (0, 16), (0, 1)),
    "no-rows-tensorwise": ((ALL, ALL), (0, 16), (1, 1)),
}


@pytest.mark.parametrize("name", SCALE_SHAPES, ids=list(SCALE_SHAPES))
def test_number_of_scales(name):
    edges, shape, expected = SCALE_SHAPES[name]
    assert Tile(*edges).scale_shape(shape) == expected


def test_a_transposed_tile_covers_the_transposed_matrix():
    tile = Tile(1, 128)
    assert tile.t() == Tile(128, 1)
    assert tile.t().t() == tile
    assert tile.t().scale_shape((300, 5)) == tuple(reversed(tile.scale_shape((5, 300))))


def test_largest_value_of_each_dtype():
    assert Float8Format(E4M3, Tile(1, 1)).max == 448.0
    assert Float8Format(E5M2, Tile(1, 1)).max == 57344.0
    assert Float8Format(E2M1, Tile(1, 1)).max == 6.0


def test_formats_are_values():
    one, other = Float8Format(E4M3, Tile(1, 32), POW2), Float8Format(E4M3, Tile(1, 32), POW2)
    assert one == other
    assert hash(one) == hash(other)
    assert one != Float8Format(E4M3, Tile(1, 32))
    with pytest.raises(dataclasses.FrozenInstanceError, match="dtype"):
        one.dtype = E5M2


def test_str_tells_formats_apart():
    formats = [
        Float8Format(dtype, Tile(*edges), rule)
        for dtype in (E4M3, E5M2, E2M1)
        for edges in ((ALL, ALL), (1, ALL), (1, 128), (128, 1))
        for rule in ScaleRule
    ]
    assert len({str(format) for format in formats}) == len(formats)
    assert str(Float8Format(E4M3, Tile(ALL, ALL))) == "tensorwise e4m3"
    assert str(Float8Format(E4M3, Tile(1, ALL), POW2)) == "rowwise e4m3 (power-of-two scales)"
    assert str(Float8Format(E5M2, Tile(1, 128))) == "1x128 e5m2"
    assert Float8Format(E4M3, Tile(1, ALL), POW2).name == "e4m3[1xall,power_of_2]"


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


@pytest.mark.parametrize(
    "name",
    [
        "",
        "e4m3",
        "e4m3[128]",
        "e4m3[1x-1]",
        "e3m4[1x32]",
        "e4m3[1x32,float]x",
        "e4m3[1x32,hadamard]",
        "e4m3[0x32]",
    ],
    ids=str,
)
def test_what_is_no_name_of_a_format_is_refused(name):
    with pytest.raises(f8sub.Float8ConfigError, match=r"like 'e4m3\[1x128,power_of_2\]'|edge"):
        Float8Format.parse(name)


@pytest.mark.parametrize("size", [0, 1, 3, -2, 24], ids=str)
def test_a_hadamard_transform_has_a_power_of_two_as_size(size):
    with pytest.raises(f8sub.Float8ConfigError, match=f"power of two as size, got {size}"):
        Float8Format(E2M1, Tile(1, 16), hadamard=size)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_stochastic_rounding_is_of_e2m1(dtype):
    with pytest.raises(f8sub.Float8ConfigError, match="stochastic rounding is defined for"):
        Float8Format(dtype, Tile(1, 16), rounding=Rounding.STOCHASTIC)


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


@pytest.mark.parametrize("name", DERIVABLE, ids=list(DERIVABLE))
def test_derivable(name):
    row, row_rule, col, col_rule = DERIVABLE[name]
    reason = why_not_derivable(
        Float8Format(E4M3, Tile(*row), row_rule), Float8Format(E4M3, Tile(*col), col_rule)
    )
    assert reason is None


@pytest.mark.parametrize("name", NOT_DERIVABLE, ids=list(NOT_DERIVABLE))
def test_not_derivable_without_rounding_twice(name):
    row, row_rule, col, col_rule = NOT_DERIVABLE[name]
    reason = why_not_derivable(
        Float8Format(E4M3, Tile(*row), row_rule), Float8Format(E4M3, Tile(*col), col_rule)
    )
    assert "round twice" in reason


def test_another_dtype_is_not_derivable():
    square = Tile(128, 128)
    assert "dtypes differ" in why_not_derivable(Float8Format(E4M3, square), Float8Format(E5M2, square))
