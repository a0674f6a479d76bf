"""Charts and diagrams of the pages, as SVG files that are the same whenever they are drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

BLUE, GREY, ORANGE, INK = "#2f6fb0", "#b8bec6", "#d98c3f", "#24292f"
COLOURS = {"bf16": GREY, "torchao": ORANGE, "f8sub": BLUE}
"""By the first word of what a bar is about."""

STYLE = {
    "svg.hashsalt": "f8sub",
    "svg.fonttype": "path",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def save(figure: Figure, path: Path) -> None:
    """Write a figure by the path's suffix, without the date."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata, dpi=110, facecolor="white")


def bars(
    title: str,
    subtitle: str,
    groups: Mapping[str, Mapping[str, float]],
    unit: str,
    pale: Collection[str] = (),
) -> Figure:
    """Horizontal bars, a panel for each group, each with its number.

    Args:
        title: in one line.
        subtitle: machine, date and what was run; it is wrapped.
        groups: panel -> bar -> number.
        unit: format of the numbers.
        pale: names of bars in a lighter colour.
    """
    with mpl.rc_context(STYLE):
        counts = [len(of) for of in groups.values()]
        figure = Figure(figsize=(8.4, 1.45 + 0.30 * sum(counts) + 0.35 * len(counts)), layout="constrained")
        note = textwrap.fill(subtitle, 130)
        figure.suptitle(title, fontweight="bold", x=0.01, ha="left")
        figure.supxlabel(note, fontsize=8, x=0.01, ha="left")
        panels = figure.subplots(len(groups), 1, height_ratios=counts, squeeze=False, sharex=True)[:, 0]
        most = max(value for of in groups.values() for value in of.values())
        for axes, (group, of) in zip(panels, groups.items(), strict=True):
            names = list(of)
            colours = [COLOURS[name.split()[0]] for name in names]
            drawn = axes.barh(names, list(of.values()), color=colours, height=0.7)
            for name, bar in zip(names, drawn, strict=True):
                bar.set_alpha(0.5 if name in pale else 1.0)
            axes.bar_label(drawn, [unit.format(value) for value in of.values()], padding=3)
            axes.invert_yaxis()
            axes.set_xlim(0, 1.12 * most)
            axes.set_title(group, loc="left", fontsize=10)
            axes.spines[["top", "right", "bottom"]].set_visible(False)
            axes.tick_params(bottom=False, labelbottom=False, left=False)
        return figure


def box(axes: Any, centre: tuple[float, float], text: str, *, colour: str, size: tuple[float, float]) -> None:
    """A rounded box with text, of one of the module's colours or white."""
    from matplotlib.patches import FancyBboxPatch

    (x, y), (width, height) = centre, size
    corner = (x - width / 2, y - height / 2)
    style = "round,pad=0,rounding_size=0.12"
    look = {"facecolor": colour, "edgecolor": INK, "linewidth": 0.9}
    axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle=style, **look))
    dark = colour in (BLUE, ORANGE)
    axes.text(x, y, text, ha="center", va="center", color="white" if dark else INK, fontsize=9)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], text: str = "") -> None:
    """An arrow between two points, with a word above its middle."""
    style = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=end, xytext=start, arrowprops=style)
    if text:
        axes.text(
            (start[0] + end[0]) / 2,
            (start[1] + end[1]) / 2 + 0.13,
            text,
            ha="center",
            va="center",
            fontsize=8,
        )


def curves(
    title: str,
    subtitle: str,
    of: Mapping[str, list[float]],
    baseline: str,
    *,
    every: int = 1,
    label: str = "loss",
    limits: tuple[float, float] = (-1, 1),
) -> Figure:
    """Lines over steps, and below them their distance from one of them in per cent.

    Args:
        title: in one line.
        subtitle: machine, date and what was run; it is wrapped.
        of: name -> a value for each step from 1 on, or for each ``every`` steps, which are marked then.
        baseline: the name that the others are compared with.
        every: steps from one value to the next.
        label: of the values.
        limits: of the distances.
    """
    marker = None if every == 1 else "o"
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 5.2), layout="constrained")
        figure.suptitle(title, fontweight="bold", x=0.01, ha="left")
        figure.supxlabel(textwrap.fill(subtitle, 130), fontsize=8, x=0.01, ha="left")
        above, below = figure.subplots(2, 1, height_ratios=(3, 1.2), sharex=True)
        for (name, values), colour in zip(of.items(), (INK, BLUE, ORANGE), strict=False):
            steps = [every * (at + 1) for at in range(len(values))]
            above.plot(steps, values, marker=marker, label=name, color=colour, linewidth=1.4, markersize=4)
            gap = [100 * (value / other - 1) for value, other in zip(values, of[baseline], strict=True)]
            below.plot(steps, gap, marker=marker, color=colour, linewidth=1.4, markersize=4)
        above.legend(frameon=False)
        above.set_ylabel(label)
        below.set_ylabel(f"% over {baseline}")
        below.set_xlabel("step")
        below.set_ylim(*limits)
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.3)
        return figure
