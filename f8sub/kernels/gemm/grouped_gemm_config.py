"""Groups, and tiles of products by them. No kernel is imported here: triton need not be installed."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Rows(NamedTuple):
    """Where groups of rows lie, which the GPU alone knows.

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
class Config:
    """How products are cut into tiles.

    Attributes:
        rows: of a tile, a power of two; ``persistent``: 128.
        cols: of a tile, a power of two, at most 128; ``persistent``: 256.
        stages: blocks of K that are loaded ahead.
        persistent: ``grouped_hopper.multiply_groups_persistently``; else ``grouped_gemm.multiply_groups``.
        group: tiles of one column that are made one after the other, so that L2 holds what they share.
        blocks: of K that a pass of the persistent kernel's loop takes, a divisor of ``stages``: each sum is filled
            up to whole passes.
        warps: of a program that is not persistent.

    Raises:
        ValueError: tiles that the kernels do not make.
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
def default_config(depth: int | None, by_block: bool) -> Config:
    """Tiles of which nothing was measured.

    Args:
        depth: blocks of K of a product by rows; None of one over rows, where only the GPU knows it.
        by_block: whether scales of ``b``'s lines are applied to each block, which take so many registers that a pass
            takes one block.
    """
    if by_block:
        blocks = 1
    elif depth is None:
        blocks = 2
    else:
        blocks = next((many for many in (4, 2) if -depth % many == -depth % 2), 2)
    return Config(128, 256, stages=4, persistent=True, group=16, blocks=blocks)
