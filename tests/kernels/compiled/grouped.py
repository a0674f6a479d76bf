"""What products by groups compile to for Hopper (sm_90a), on any machine: as ``gemms.py``, of which the rules are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from f8sub import ALL, Operand
from f8sub.kernels.gemm.tuning import GroupedConfig, Rows
from tests.kernels.compiled import gemms
from tests.kernels.grouped import PAIRS

if TYPE_CHECKING:
    from f8sub.kernels.triton.launch import Launch

CONFIGS = [
    *(GroupedConfig(128, 256, 4, persistent=True, blocks=blocks) for blocks in (4, 2, 1)),
    GroupedConfig(128, 128, 4),
    GroupedConfig(64, 128, 5, warps=4),
]
EXPERTS, ROWS, COLS, DEPTH = 8, 8192, 1024, 512


@dataclass(frozen=True)
class Case:
    """One kernel: ``PAIRS``' name of its formats, its result's dtype, whether over rows, and its tiles."""

    pair: str
    out: str
    over_rows: bool
    fast: bool
    config: GroupedConfig

    @property
    def words(self) -> str:
        """What it is, in words."""
        how = f"{'over' if self.over_rows else 'by'} rows{', fast' if self.fast else ''}"
        return f"{how}, {self.pair} -> {self.out}, {self.config}"


def is_compiled(pair: str, config: GroupedConfig) -> bool:
    """Columns with scales of their own for each block take too many registers for more than one in a pass."""
    tile = PAIRS[pair][1].tile
    return config.blocks == 1 or tile.rows != 1 or tile.cols == ALL


def cases() -> list[Case]:
    """Every tile of every pair of formats into bfloat16, and the first into float32."""
    made = [
        Case(pair, "bf16", over, fast, config)
        for pair, formats in PAIRS.items()
        for over in (False, True)
        for config in CONFIGS
        for fast in (False, True)[: 1 + all(f.tile.cols == ALL for f in formats)]
        if is_compiled(pair, config)
    ]
    return made + [Case(pair, "fp32", over, False, CONFIGS[2]) for pair in PAIRS for over in (False, True)]


def launches_of(case: Case) -> list[Launch]:
    """Its launches, over matrices that are not read."""
    from f8sub.kernels.triton.gemm_launch import product_by_rows, product_over_rows

    a_format, b_format = PAIRS[case.pair]
    first = torch.zeros(EXPERTS, dtype=torch.int32)
    rows = Rows(first, first, first, ROWS)
    shapes = ((COLS, ROWS), (DEPTH, ROWS)) if case.over_rows else ((ROWS, DEPTH), (EXPERTS, COLS, DEPTH))
    codes = [torch.empty(s, dtype=f.dtype) for s, f in zip(shapes, (a_format, b_format), strict=True)]
    how = gemms.DTYPES[case.out], case.fast, case.config, gemms.MULTIPROCESSORS
    if case.over_rows:
        scales = [
            torch.empty(
                (EXPERTS, 1 if f.tile.rows == ALL else s[0]) if f.tile.cols == ALL else f.tile.scale_shape(s)
            )
            for s, f in zip(shapes, (a_format, b_format), strict=True)
        ]
        a, b = (Operand(*part) for part in zip(codes, scales, (a_format, b_format), strict=True))
        return product_over_rows(a, b, rows, *how)[0]
    of_a = (EXPERTS, 1) if a_format.tile.rows == ALL else a_format.tile.scale_shape(shapes[0])
    of_b = EXPERTS, *b_format.tile.scale_shape((COLS, DEPTH))
    a, b = Operand(codes[0], torch.empty(of_a), a_format), Operand(codes[1], torch.empty(of_b), b_format)
    return product_by_rows(a, b, rows, *how)[0]


def launch_of(case: Case) -> Launch:
    """The one that multiplies."""
    return launches_of(case)[1]


def report(case: Case) -> dict:
    """``gemms.report`` of a product by groups."""
    return gemms.report(case, launch_of)
