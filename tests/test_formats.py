"""Tile, Float8Format and the rule of what can be derived: pure data, refused where it makes no sense."""

import dataclasses

import pytest
import torch

import f8sub
from f8sub import ALL, Float8Format, ScaleRule, Tile
from f8sub.formats import why_not_derivable

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
POW2 = ScaleRule.POWER_OF_2


@pytest.mark.parametrize("edges", [(0, 1), (1, 0), (-2, 128), (128, -3)], ids=str)
def test_a_tile_edge_is_positive_or_all(edges):
    with pytest.raises(f8sub.Float8ConfigError, match="positive number of elements or ALL"):
        Tile(*edges)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_a_format_has_a_float8_dtype(dtype):
    with pytest.raises(f8sub.Float8ConfigError, match=str(dtype)):
        Float8Format(dtype, Tile(ALL, ALL))


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
        for dtype in (E4M3, E5M2)
        for edges in ((ALL, ALL), (1, ALL), (1, 128), (128, 1))
        for rule in ScaleRule
    ]
    assert len({str(format) for format in formats}) == len(formats)
    assert str(Float8Format(E4M3, Tile(1, ALL), POW2)) == "e4m3[1xall,power_of_2]"


DERIVABLE = {
    "square-float": ((128, 128), ScaleRule.FLOAT, (128, 128), ScaleRule.FLOAT),
    "tensorwise-float": ((ALL, ALL), ScaleRule.FLOAT, (ALL, ALL), ScaleRule.FLOAT),
    "same-elements-transposed": ((1, 128), ScaleRule.FLOAT, (128, 1), ScaleRule.FLOAT),
    "rows-pow2": ((1, ALL), POW2, (1, ALL), POW2),
    "1x32-pow2": ((1, 32), POW2, (1, 32), POW2),
    "two-tiles-pow2": ((128, 128), POW2, (1, 32), POW2),
}
NOT_DERIVABLE = {
    "rows-float": ((1, ALL), ScaleRule.FLOAT, (1, ALL), ScaleRule.FLOAT),
    "1x128-float": ((1, 128), ScaleRule.FLOAT, (1, 128), ScaleRule.FLOAT),
    "another-tile-float": ((128, 128), ScaleRule.FLOAT, (1, 128), ScaleRule.FLOAT),
    "rules-differ": ((1, ALL), POW2, (1, ALL), ScaleRule.FLOAT),
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
