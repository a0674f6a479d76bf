"""The ways in which a weight crosses the wire, and one recipe that takes each."""

import math
from collections.abc import Sequence

import pytest

import f8sub
from f8sub.formats import ALL

ONE_RECIPE_A_WIRE = ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4")
"""One scale, rows and blocks from the amax table; scales that follow the row's codes; two codes a byte."""

PER_LAYER = {
    "blocks.1.[gu]*": "rowwise_with_gw_hp",
    "blocks.1.o": "mxfp8",
    "blocks.1.v": "nvfp4",
    "blocks.1.down": "blockwise",
    "blocks.0": "rowwise",
    "*": "tensorwise",
}
"""Each of them in the blocks of a Transformer."""

QUICK = ("tensorwise", "mxfp8", "delayed")
"""Recipes of the default suite where a test runs on each: a scale from the amax table, scales that follow the codes,
and a scale from a history. The others are long tests."""


def on_each(recipes: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrize ``recipe``."""
    marks = {recipe: () if recipe in QUICK else pytest.mark.long for recipe in recipes}
    cases = [pytest.param(r, marks=mark) for r, mark in marks.items()]
    return pytest.mark.parametrize("recipe", cases, ids=recipes)


def wire_of(recipe: str) -> tuple[object, ...]:
    """What decides how the weights of a recipe are sent."""
    format = f8sub.get_recipe(recipe).fprop.b
    rows, cols = (edge if edge in (1, ALL) else "block" for edge in (format.tile.rows, format.tile.cols))
    return rows, cols, format.codes_per_byte


def gathered_bytes(recipe: str, rows: int, cols: int) -> int:
    """Bytes of ``rows`` of a weight sharded by rows: codes; exponents of 32 elements; rows filled up to 16 bytes."""
    if recipe == "nvfp4":
        return rows * cols // 2
    if recipe == "mxfp8":
        codes, blocks = math.ceil(cols / 16) * 16, math.ceil(cols / 32)
        return rows * (codes + math.ceil(blocks / 16) * 16)
    return rows * cols


def least_decibels(recipe: str) -> float:
    """SQNR that a product of a few layers keeps on gaussian data: e4m3 has 3 bits behind the leading one, e2m1 1."""
    return 10.0 if recipe == "nvfp4" else 25.0
