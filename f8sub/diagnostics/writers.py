"""Writes a monitor's rows to a file, TensorBoard, Weights & Biases or a function; and draws them."""

import contextlib
import itertools
import json
import math
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from f8sub.diagnostics.statistics import ERRORS_ALONE, Statistics
from f8sub.errors import Float8ConfigError, Float8Warning

Writer = Callable[[int, Sequence[Statistics]], None]
"""Takes a step's number and its rows."""

# all but step, layer, role and format
_NUMBERS = Statistics._fields[4:]

_MAGNITUDES = ("amax", "rms", "scale_min", "scale_max")
"""Statistics that layers have powers of ten apart."""


def numbers_of(row: Statistics) -> tuple[str, ...]:
    """Return the names of the statistics that a row has."""
    return ("sqnr",) if row.role in ERRORS_ALONE else _NUMBERS


def jsonl(path: str | os.PathLike[str]) -> Writer:
    """Append one line of JSON per row, null for NaN and infinity; ``pandas.read_json(path, lines=True)`` reads them.

    A disk that fills does not end the run: the step's rows are lost, with a ``Float8Warning``.
    """
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)

    def write(step: int, rows: Sequence[Statistics]) -> None:
        lines = []
        for row in rows:
            # JSON has neither NaN nor infinity.
            numbers = {name: value for name in _NUMBERS if math.isfinite(value := getattr(row, name))}
            lines.append(json.dumps({**row._asdict(), **dict.fromkeys(_NUMBERS), **numbers}, allow_nan=False))
        # the length to go back to
        whole = file.stat().st_size if file.exists() else 0
        try:
            with file.open("a") as opened:
                opened.write("\n".join([*lines, ""]))
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(file, whole)  # lest the next row goes on where this one broke off
            warnings.warn(
                f"a monitor's rows of step {step} are lost, because {file} could not be written: {error}",
                Float8Warning,
                stacklevel=2,
            )

    return write


def lasting(write: Writer) -> Writer:
    """Return a writer that ends no run: if ``write`` raises, the step's rows are lost, and the first time it warns."""
    warned = False

    def guarded(step: int, rows: Sequence[Statistics]) -> None:
        nonlocal warned
        try:
            write(step, rows)
        except Exception as error:  # whatever a user's function raises
            if not warned:
                warnings.warn(
                    f"a function that Monitor gives rows to, {getattr(write, '__qualname__', write)}, raised "
                    f"{type(error).__name__} at step {step}: {error}; rows of steps where it does are lost",
                    Float8Warning,
                    stacklevel=2,
                )
            warned = True

    return guarded


def tensorboard(writer: Any) -> Writer:
    """Write scalars ``float8/ROLE.STATISTIC/LAYER`` to a ``SummaryWriter``."""

    def write(step: int, rows: Sequence[Statistics]) -> None:
        for row in rows:
            for name in numbers_of(row):
                writer.add_scalar(f"float8/{row.role}.{name}/{row.layer}", getattr(row, name), step)

    return write


def wandb(run: Any) -> Writer:
    """Call ``run.log`` once per step, with keys as in ``tensorboard``."""

    def write(step: int, rows: Sequence[Statistics]) -> None:
        run.log(
            {
                f"float8/{row.role}.{name}/{row.layer}": getattr(row, name)
                for row in rows
                for name in numbers_of(row)
            },
            step=step,
        )

    return write


def heatmap(rows: Sequence[Statistics], path: str | os.PathLike[str], role: str, statistic: str) -> None:
    """Draw layers by steps: of a SQNR red is low and blue is high, of another statistic a darker colour is less.

    Raises:
        Float8ConfigError: matplotlib is not installed, there is no such row, or the path ends like no picture.
    """
    try:
        from matplotlib.colors import LogNorm, Normalize
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Float8ConfigError(
            "Monitor.heatmap draws with matplotlib, which is not installed: pip install matplotlib"
        ) from error
    if not rows:
        raise Float8ConfigError(
            "Monitor.heatmap has nothing to draw: no step was sampled yet; enter the monitor around a forward and "
            "backward, or attach it to the optimizer"
        )
    shown = [row for row in rows if row.role == role]
    if not shown or statistic not in _NUMBERS:
        roles = sorted({row.role for row in rows})
        raise Float8ConfigError(
            f"no sample has {statistic!r} of {role!r}; there is {', '.join(_NUMBERS)} of {', '.join(roles)}"
        )
    layers, steps = list(dict.fromkeys(row.layer for row in shown)), sorted({row.step for row in shown})
    values = {(row.layer, row.step): getattr(row, statistic) for row in shown}
    # NaN is drawn as a gap.
    grid = [[values.get((layer, step), float("nan")) for step in steps] for layer in layers]
    figure = Figure(figsize=(4 + 0.25 * len(steps), 1.2 + 0.18 * len(layers)), layout="constrained")
    axes = figure.subplots()
    is_sqnr = statistic.endswith("sqnr")
    told = [value for row in grid for value in row if math.isfinite(value)]
    # dB, the same colours in every picture of SQNR
    norm = Normalize(10, 32) if is_sqnr else Normalize()
    if statistic in _MAGNITUDES and told and min(told) > 0:
        norm = LogNorm(min(told), max(told))
    # A small amax is not a bad one, nor is a large share that is flushed a good one: their colours judge nothing.
    cmap = "RdYlBu" if is_sqnr else "viridis"
    image = axes.imshow(grid, aspect="auto", interpolation="nearest", cmap=cmap, norm=norm)
    segments = zip(*(layer.split(".")[:-1] for layer in layers), strict=False)
    # What all names begin with is shown once, at the axis.
    same = itertools.takewhile(lambda names: len(set(names)) == 1, segments)
    shared = "".join(f"{names[0]}." for names in same)
    axes.set_yticks(range(len(layers)), [layer.removeprefix(shared) for layer in layers], fontsize=6)
    axes.set_ylabel(shared.strip("."), fontsize=8)
    # at most 12 labels
    every = -(-len(steps) // 12)
    axes.set_xticks(range(0, len(steps), every), list(map(str, steps[::every])), fontsize=6)
    axes.set_xlabel("step")
    figure.colorbar(image, label=f"{statistic}{', dB' if is_sqnr else ''}")
    formats = ", ".join(sorted({row.format for row in shown}))
    figure.suptitle(f"{role} in {formats}", fontsize=8)
    if is_sqnr:
        axes.set_title("a Gaussian has 31 dB in e4m3, 25 in e5m2", fontsize=6)
    kind, kinds = Path(path).suffix[1:].lower(), figure.canvas.get_supported_filetypes()
    if kind and kind not in kinds:
        raise Float8ConfigError(f"{path} has the end of no picture; Monitor.heatmap draws {', '.join(kinds)}")
    figure.savefig(path, dpi=120)
