"""The picture of what happens to x, w and dy in one training step: docs/images/data_flow.svg.

It is drawn with matplotlib and renewed by

    python scripts/tables/data_flow.py docs/images/data_flow.svg
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import tyro
from matplotlib.figure import Figure

from scripts.tables.drawing import BLUE, GREY, ORANGE, STYLE, arrow, box, save

LEGEND = (
    (GREY, "high precision (bf16 or float32)"),
    (BLUE, "float8, 1 byte per element"),
    (ORANGE, "one matmul in float8"),
)
SIZE, WIDE = (1.7, 0.62), (2.0, 0.62)


def draw() -> Figure:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 5.2), layout="constrained")
        axes = figure.subplots()
        axes.set_xlim(0, 12.4)
        axes.set_ylim(0, 6.7)
        axes.axis("off")
        for row, name in (
            (5.9, "forward"),
            (3.35, "backward"),
            (1.1, "after optimizer.step(): precompute_scales"),
        ):
            axes.text(0.05, row + 0.42, name, fontweight="bold", ha="left")
        _forward(axes)
        _backward(axes)
        _after(axes)
        for i, (colour, text) in enumerate(LEGEND):
            box(axes, (0.35 + 4.2 * i, 0.2), "", colour=colour, size=(0.42, 0.24))
            axes.text(0.7 + 4.2 * i, 0.2, text, va="center", fontsize=8)
        return figure


def _forward(axes: Any) -> None:
    box(axes, (1.15, 5.75), "w, a shard", colour=GREY, size=SIZE)
    arrow(axes, (2.0, 5.75), (3.4, 5.75), "cast per step")
    box(axes, (4.25, 5.75), "float8 shard", colour=BLUE, size=SIZE)
    arrow(axes, (5.1, 5.75), (6.8, 5.75), "all-gather: 1 byte")
    box(axes, (7.65, 5.75), "float8 w", colour=BLUE, size=SIZE)
    arrow(axes, (8.5, 5.7), (9.4, 5.4))
    box(axes, (1.15, 4.85), "x", colour=GREY, size=SIZE)
    arrow(axes, (2.0, 4.85), (3.4, 4.85), "quantize")
    box(axes, (4.25, 4.85), "float8 x", colour=BLUE, size=SIZE)
    arrow(axes, (5.1, 4.9), (9.4, 5.2))
    box(axes, (10.4, 5.3), "y = x @ w.t()", colour=ORANGE, size=WIDE)
    arrow(axes, (11.4, 5.3), (11.95, 5.3))
    axes.text(12.15, 5.3, "y", ha="center", va="center")


def _backward(axes: Any) -> None:
    arrow(axes, (4.6, 4.54), (6.1, 3.51))
    axes.text(5.6, 4.15, "saved: 1 byte per element", fontsize=8, ha="left", va="center")
    box(axes, (1.15, 3.2), "dy", colour=GREY, size=SIZE)
    arrow(axes, (2.0, 3.2), (3.4, 3.2), "quantize")
    box(axes, (4.25, 3.2), "float8 dy", colour=BLUE, size=SIZE)
    arrow(axes, (5.1, 3.2), (5.5, 3.2))
    box(axes, (6.5, 3.2), "dw = dy.t() @ x", colour=ORANGE, size=WIDE)
    arrow(axes, (7.5, 3.2), (9.4, 3.2), "reduce-scatter")
    box(axes, (10.4, 3.2), "dw, a shard", colour=GREY, size=WIDE)
    box(axes, (4.25, 2.35), "float8 w", colour=BLUE, size=SIZE)
    axes.text(3.3, 2.35, "all-gather: 1 byte", fontsize=8, ha="right", va="center")
    arrow(axes, (5.1, 2.35), (5.5, 2.35))
    arrow(axes, (5.1, 3.0), (5.5, 2.55))
    box(axes, (6.5, 2.35), "dx = dy @ w", colour=ORANGE, size=WIDE)
    arrow(axes, (7.5, 2.35), (9.4, 2.35))
    box(axes, (10.4, 2.35), "dx", colour=GREY, size=WIDE)


def _after(axes: Any) -> None:
    size = (2.4, 0.62)
    box(axes, (1.5, 0.95), "amaxes of all shards", colour=GREY, size=size)
    arrow(axes, (2.7, 0.95), (3.4, 0.95))
    box(axes, (4.6, 0.95), "one table", colour=GREY, size=size)
    arrow(axes, (5.8, 0.95), (9.2, 0.95), "one all-reduce (maximum)")
    box(axes, (10.4, 0.95), "scales, in place", colour=GREY, size=size)


def main(file: tyro.conf.Positional[Path]) -> None:
    save(draw(), file)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
