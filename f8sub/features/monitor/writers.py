"""Where a monitor's rows go: a file, TensorBoard, Weights & Biases, a function; and a picture."""

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from f8sub.errors import Float8ConfigError
from f8sub.features.operand_statistics.statistics import GRADIENT, Statistics

Writer = Callable[[int, Sequence[Statistics]], None]
"""Takes a step's number and its rows."""

_NUMBERS = Statistics._fields[4:]


def numbers_of(row: Statistics) -> tuple[str, ...]:
    """Names of the statistics that a row has."""
    return ("sqnr",) if row.role == GRADIENT else _NUMBERS


def jsonl(path: str | os.PathLike[str]) -> Writer:
    """Append a line of JSON a row, null for NaN and infinity; ``pandas.read_json(path, lines=True)`` reads them."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)

    def write(step: int, rows: Sequence[Statistics]) -> None:
        with file.open("a") as opened:
            for row in rows:
                numbers = {name: value for name in _NUMBERS if math.isfinite(value := getattr(row, name))}
                of_json = {**row._asdict(), **dict.fromkeys(_NUMBERS), **numbers}
                opened.write(json.dumps(of_json, allow_nan=False) + "\n")

    return write


def tensorboard(writer: Any) -> Writer:
    """Scalars ``float8/ROLE.STATISTIC/LAYER`` of a ``SummaryWriter``."""

    def write(step: int, rows: Sequence[Statistics]) -> None:
        for row in rows:
            for name in numbers_of(row):
                writer.add_scalar(f"float8/{row.role}.{name}/{row.layer}", getattr(row, name), step)

    return write


def wandb(run: Any) -> Writer:
    """One ``run.log`` a step, with keys as in ``tensorboard``."""

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
    """Draw layers by steps.

    Raises:
        Float8ConfigError: matplotlib is not installed, or there is no such row.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Float8ConfigError("Monitor.heatmap draws with matplotlib, which is not installed") from error
    shown = [row for row in rows if row.role == role]
    if not shown or statistic not in _NUMBERS:
        roles = sorted({row.role for row in rows})
        raise Float8ConfigError(
            f"no sample has {statistic!r} of {role!r}; there is {', '.join(_NUMBERS)} of {', '.join(roles) or 'none'}"
        )
    layers, steps = list(dict.fromkeys(row.layer for row in shown)), sorted({row.step for row in shown})
    values = {(row.layer, row.step): getattr(row, statistic) for row in shown}
    grid = [[values.get((layer, step), float("nan")) for step in steps] for layer in layers]
    figure = Figure(figsize=(4 + 0.25 * len(steps), 1.2 + 0.18 * len(layers)), layout="constrained")
    axes = figure.subplots()
    lowest, highest = (10, 32) if statistic.endswith("sqnr") else (None, None)
    image = axes.imshow(
        grid, aspect="auto", interpolation="nearest", cmap="RdYlGn", vmin=lowest, vmax=highest
    )
    axes.set_yticks(range(len(layers)), layers, fontsize=6)
    every = -(-len(steps) // 12)
    axes.set_xticks(range(0, len(steps), every), list(map(str, steps[::every])), fontsize=6)
    axes.set_xlabel("step")
    unit = ", dB" if statistic.endswith("sqnr") else ""
    figure.colorbar(image, label=f"{role}: {statistic}{unit}")
    figure.savefig(path, dpi=120)
