"""Tiles of GEMMs, dense and grouped, and the measurements of dense ones.

It was measured which kernel was faster, in which tiles, on which GPU. The measurements are files of
``f8sub/kernels/gemm/gemm_tables``, one per GPU, written by ``scripts/tune_gemm.py``. A shape's class is the measured
shape that is nearest, in doublings of its dimensions, of those with few rows or of those with many.

No kernel is imported here: triton need not be installed.
"""

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from f8sub.formats import Float8Format

FOLDER = Path(__file__).parent / "gemm_tables"

FEW_ROWS = 64
"""Up to as many rows of ``a`` a product is bound by the reading of ``b``."""

MARGIN = 1.01
"""How many times as fast as ``scaled_mm`` another kernel has to be to be preferred; less is within the spread."""


@dataclass(frozen=True, slots=True)
class Config:
    """Describes how a product is cut into tiles.

    Attributes:
        rows: of a tile, a power of two; ``persistent``: 128.
        cols: of a tile, a power of two; ``persistent``: 256.
        stages: blocks of K that are loaded ahead.
        persistent: ``gemm_sm90.multiply_persistently``; else ``gemm.multiply``.
        group: tiles of one column that are computed one after the other, so that L2 holds what they share.
        parts: of K that are summed by programs of their own; of ``persistent`` 1.
        warps: of a program of ``gemm.multiply``.

    Raises:
        ValueError: of ``persistent``, other tiles or K in parts, which that kernel does not compute.
    """

    rows: int
    cols: int
    stages: int
    persistent: bool = False
    group: int = 8
    parts: int = 1
    warps: int = 4

    def __post_init__(self) -> None:
        if self.persistent and (self.rows, self.cols, self.parts) != (128, 256, 1):
            raise ValueError(f"the persistent kernel makes tiles of 128x256, found {self}")

    def __str__(self) -> str:
        kind = "persistent" if self.persistent else f"{self.warps} warps"
        parts = f", K in {self.parts}" if self.parts > 1 else ""
        return f"{self.rows}x{self.cols}, {kind}, {self.stages} stages, groups of {self.group}{parts}"


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured product on one GPU.

    Attributes:
        shape: (M, K, N).
        rates: TFLOP/s by the kernels of ``measured.KERNELS``: ``scaled_mm``, where it takes the formats; ``by_row``;
            and ``triton``, in the fastest tiles.
        config: those tiles, the fields of ``Config``; None where no kernel of ours was right.
        fast_accum: with which accumulation; None where all kernels ignore it.
    """

    shape: tuple[int, int, int]
    rates: Mapping[str, float]
    config: dict[str, Any] | None
    fast_accum: bool | None = None

    @property
    def winner(self) -> str:
        """The kernel to take."""
        theirs = self.rates.get("scaled_mm", 0.0)
        others = {name: rate for name, rate in self.rates.items() if name != "scaled_mm"}
        best = max(others, key=lambda name: others[name], default=None)
        return "scaled_mm" if best is None or others[best] <= theirs * MARGIN else best

    def __str__(self) -> str:
        rates = ", ".join(f"{name} {rate:.0f}" for name, rate in self.rates.items())
        return f"{'x'.join(map(str, self.shape))}: {self.winner} ({rates} TFLOP/s)"

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> "Measured":
        """Read a product of a table's file."""
        return cls(tuple(row["shape"]), row["rates"], row["config"], row.get("fast_accum"))


def file_of(gpu: str) -> Path:
    """Return the file with the measurements of a GPU of that name, there or not."""
    return FOLDER / (re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_") + ".json")


def kind(format: Float8Format) -> str:
    """Return the name of what a GEMM's speed depends on in a format: dtype and tile, not how scales are computed."""
    return Float8Format(format.dtype, format.tile).name


@functools.cache
def of(gpu: str, a: Float8Format, b: Float8Format) -> tuple[Measured, ...]:
    """Return all that was measured of a pair of formats on a GPU of that name; empty where nothing was."""
    path = file_of(gpu)
    if not path.exists():
        return ()
    pair = {"a": kind(a), "b": kind(b)}
    return tuple(
        Measured.read(row)
        for row in json.loads(path.read_text())["products"]
        if {"a": row["a"], "b": row["b"]} == pair
    )


def nearest(
    gpu: str, a: Float8Format, b: Float8Format, shape: tuple[int, int, int], fast_accum: bool
) -> Measured | None:
    """Return the measurement that stands for a shape (M, K, N); None where nothing was measured of such a class."""
    # Products of few rows are bound by reading b, others by the tensor cores: tiles of one are wrong for the other.
    few = shape[0] <= FEW_ROWS
    candidates = [
        measured
        for measured in of(gpu, a, b)
        if (measured.shape[0] <= FEW_ROWS) is few and measured.fast_accum in (None, fast_accum)
    ]
    return min(candidates, key=lambda measured: distance(measured.shape, shape), default=None)


def distance(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    """Return the doublings of M, K and N between two shapes, in all."""
    # In doublings: 128 rows are to 256 what 4096 are to 8192.
    return sum(abs(math.log2(a / b)) for a, b in zip(one, other, strict=True))


class Rows(NamedTuple):
    """Tells where groups of rows begin and end, which the GPU alone knows.

    Attributes:
        first: int32, (E,), the first row of each.
        ends: int32, (E,), the row after its last one.
        placed: int32, (E,), its first row in the operand, where that leaves room between groups.
        total: rows in all.
    """

    first: torch.Tensor
    ends: torch.Tensor
    placed: torch.Tensor
    total: int


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """Describes how grouped products are cut into tiles.

    Attributes:
        rows: of a tile, a power of two; ``persistent``: 128.
        cols: of a tile, a power of two, at most 128; ``persistent``: 256.
        stages: blocks of K that are loaded ahead.
        persistent: ``gemm_sm90.multiply_persistently``; else ``grouped_gemm.multiply_groups``.
        group: tiles of one column that are computed one after the other, so that L2 holds what they share.
        blocks: of K that a pass of the persistent kernel's loop takes, a divisor of ``stages``: each sum is filled
            up to whole passes.
        warps: of a program that is not persistent.

    Raises:
        ValueError: tiles that the kernels do not compute.
    """

    rows: int
    cols: int
    stages: int
    persistent: bool = False
    group: int = 8
    blocks: int = 1
    warps: int = 8

    def __post_init__(self) -> None:
        if self.persistent and ((self.rows, self.cols) != (128, 256) or self.stages % self.blocks):
            raise ValueError(
                f"the persistent kernel makes tiles of 128x256 in passes of its stages, found {self}"
            )
        if not self.persistent and (max(self.rows, self.cols) > 128 or self.blocks != 1):
            raise ValueError(f"tiles are of at most 128x128, one block of K at a time, found {self}")

    def __str__(self) -> str:
        kind = f"persistent, passes of {self.blocks}" if self.persistent else f"{self.warps} warps"
        return f"{self.rows}x{self.cols}, {kind}, {self.stages} stages, groups of {self.group}"


@functools.cache
def default_grouped_config(depth: int | None, by_block: bool) -> GroupedConfig:
    """Choose tiles of which nothing was measured.

    Args:
        depth: blocks of K of a product by rows; None of one over rows, where only the GPU knows it.
        by_block: whether scales of ``b``'s lines are applied to each block, which take so many registers that a pass
            takes one block.
    """
    if by_block:
        blocks = 1
    elif depth is None:
        # The count of blocks is filled up to whole passes: short passes waste less where the GPU alone knows it.
        blocks = 2
    else:
        # The longest pass that adds no more empty blocks than passes of two would.
        blocks = next((many for many in (4, 2) if -depth % many == -depth % 2), 2)
    return GroupedConfig(128, 256, stages=4, persistent=True, group=16, blocks=blocks)
