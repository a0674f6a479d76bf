"""Losses of runs that are finished: of f8sub's trainer, torchtitan's, or any that writes TensorBoard or JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

TRAINING = ("loss_metrics/global_avg_loss", "loss")
"""Names that the training loss goes by: torchtitan's in TensorBoard, and that of JSON lines."""

HELD_OUT = ("validation_metrics/loss", "eval_loss")
"""Likewise, the loss of the validator."""

LAST = 0.1
"""Where nothing was held out, a run's loss is the mean of this share of its logged training losses, the last ones."""


class Recorded(NamedTuple):
    """One run."""

    training: dict[int, float]  # loss by step
    held_out: float | None  # the last one; None where none was logged

    @property
    def final(self) -> float:
        """What arms are compared by."""
        if self.held_out is not None:
            return self.held_out
        losses = [self.training[step] for step in sorted(self.training)]
        last = losses[-max(1, round(LAST * len(losses))) :]
        return math.fsum(last) / len(last)


def read_run(path: Path) -> Recorded:
    """Read a run's losses.

    ``path`` is a file of JSON lines with ``step`` and a loss; or a folder, with such a ``metrics.jsonl`` or
    TensorBoard's event files anywhere in it. Where a run was resumed, the later file says what a step's loss is.
    """
    names = (*TRAINING, *HELD_OUT)
    series = read_tensorboard(path, names) if path.is_dir() else {name: {} for name in names}
    for file in [path] if path.is_file() else sorted(path.rglob("metrics.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            for name in series.keys() & record.keys():
                series[name][int(record["step"])] = float(record[name])
    training, held_out = (
        next((series[name] for name in names if series[name]), {}) for names in (TRAINING, HELD_OUT)
    )
    if not training:
        raise ValueError(
            f"{path}: no training loss, by the names {' or '.join(TRAINING)}, in TensorBoard's event files or "
            "metrics.jsonl; torchtitan writes them with --metrics.enable_tensorboard"
        )
    return Recorded(training, held_out[max(held_out)] if held_out else None)


def read_tensorboard(folder: Path, names: Iterable[str]) -> dict[str, dict[int, float]]:
    """Name -> step -> value, of what event files anywhere in a folder have by these names; a later file counts."""
    series: dict[str, dict[int, float]] = {name: {} for name in names}
    files = sorted(folder.rglob("events.out.tfevents.*"))
    if not files:
        return series
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for file in files:
        events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()  # 0: all of them
        for name in series.keys() & set(events.Tags()["scalars"]):
            series[name] |= {event.step: event.value for event in events.Scalars(name)}
    return series


def arms_of(given: list[list[str]], baseline: str) -> dict[str, list[Recorded]]:
    """The runs of each arm, in the order of its seeds; an error where they cannot be compared with ``baseline``.

    ``given`` has of each arm its name, and the files or folders of its runs.
    """
    arms = {name: [read_run(Path(path)) for path in paths] for name, *paths in given}
    counts = {name: len(runs) for name, runs in arms.items()}
    if baseline not in arms or len(arms) < 2 or len(arms) < len(given):
        raise ValueError(
            f"arms {[name for name, *_ in given]}: give {baseline} and at least one other, each once"
        )
    if 0 in counts.values() or len(set(counts.values())) > 1:
        raise ValueError(
            f"runs of each arm: {counts}; give those of the same seeds for every arm, in one order"
        )
    steps = {name: [sorted(run.training) for run in runs] for name, runs in arms.items()}
    logged = steps[baseline][0]
    if other := next((name for name, runs in steps.items() if any(run != logged for run in runs)), None):
        raise ValueError(
            f"{other}: logged other steps than the first run of {baseline}, which has {len(logged)}, {logged[0]} to "
            f"{logged[-1]}; compare runs of the same length and the same log interval"
        )
    if len({run.held_out is None for runs in arms.values() for run in runs}) > 1:
        raise ValueError("some runs have a held-out loss and some have none; validate in all arms or in none")
    return arms
