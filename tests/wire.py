"""Counts what a process sends: every c10d collective with the bytes it fills, by name.

And the ways in which a weight crosses the wire, with one recipe that takes each.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import f8sub
from f8sub import ALL

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


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(_bytes(item) for item in value)
    return 0


class Wire(TorchDispatchMode):
    """``calls`` and ``output_bytes`` of each collective, such as ``_allgather_base_`` and ``allreduce_``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.output_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2]
            found = func(*args, **(kwargs or {}))
            self.calls[name] += 1
            self.output_bytes[name] += _bytes(args[0] if func.namespace == "c10d" else found)
            return found
        return func(*args, **(kwargs or {}))

    @property
    def gathered(self) -> int:
        """Bytes that all-gathers filled on this rank."""
        return sum(count for name, count in self.output_bytes.items() if "allgather" in name)

    @property
    def all_reduces(self) -> int:
        return sum(count for name, count in self.calls.items() if "allreduce" in name)


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
