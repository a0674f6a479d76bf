"""Progress on the terminal, metrics.jsonl and TensorBoard, all written by rank 0."""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from f8sub.diagnostics import writers
from f8sub.diagnostics.statistics import GRADIENT, Statistics
from f8sub_pretrain.settings import Settings


class Metrics:
    """Where a run's numbers go. On ranks other than 0 every method does nothing."""

    def __init__(self, settings: Settings, folder: Path, rank: int, title: str) -> None:
        self._enabled = rank == 0
        self._console = Console(highlight=False, soft_wrap=True)
        self._steps = settings.training.steps
        self._log_interval = settings.metrics.log_interval
        self._tensorboard = settings.metrics.tensorboard
        self._folder = folder
        self.title = title

    def open(self, first_step: int) -> None:
        """Start writing, the steps before ``first_step`` being there already.

        Lines of later steps, which a run that was stopped after its last checkpoint has left, are removed.

        Args:
            first_step: The first step that this process trains.
        """
        if not self._enabled:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "metrics.jsonl"
        kept = (
            [record for record in read_metrics(path) if record["step"] < first_step] if path.exists() else []
        )
        path.write_text("".join(json.dumps(record) + "\n" for record in kept))
        self._lines = path.open("a", buffering=1)
        numerics = self._folder / "numerics.jsonl"
        if numerics.exists():
            rows = [row for row in read_metrics(numerics) if row["step"] < first_step]
            numerics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self._writer = None
        if self._tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder / "tensorboard"), purge_step=first_step)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            expand=True,
        )
        self._task = self._bar.add_task(self.title, total=self._steps, completed=first_step - 1, numbers="")
        self._bar.start()
        self._started = time.monotonic()
        self._first_step = first_step

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the progress bar and close the files."""
        if self._enabled and hasattr(self, "_bar"):
            self._bar.stop()
            self._lines.close()
            if self._writer:
                self._writer.close()

    def rename(self, title: str) -> None:
        """Give the run another title from the next line on."""
        self.title = title
        if self._enabled and hasattr(self, "_bar"):
            self._bar.update(self._task, description=title)

    def say(self, line: str) -> None:
        """Print one line above the progress bar."""
        if self._enabled:
            self._console.print(line, markup=False)

    def write(self, record: dict[str, Any]) -> None:
        """Write one line of metrics.jsonl, and its numbers to TensorBoard.

        Args:
            record: ``step`` and numbers. What is not finite is written as null, which JSON can say.
        """
        if not self._enabled:
            return
        self._lines.write(json.dumps({key: _json_number(value) for key, value in record.items()}) + "\n")
        if self._writer:
            for key, value in record.items():
                if key not in ("step", "time"):
                    self._writer.add_scalar(key, value, record["step"])

    def write_numerics(self, step: int, rows: Sequence[Any]) -> None:
        """Write what a monitor found in one step to numerics.jsonl and TensorBoard.

        Args:
            step: The steps that were trained since ``open``.
            rows: A statistic of each operand of each layer.
        """
        if not self._enabled:
            return
        step += self._first_step
        with (self._folder / "numerics.jsonl").open("a") as file:
            for row in rows:
                record = {**row._asdict(), "step": step}
                file.write(json.dumps({key: _json_number(value) for key, value in record.items()}) + "\n")
        if self._writer:
            writers.tensorboard(self._writer)(step, rows)

    def draw_numerics(self) -> None:
        """Draw the SQNR of all that numerics.jsonl has, layers by steps: the median row's, or all of a gradient's."""
        file = self._folder / "numerics.jsonl"
        if not self._enabled or not file.exists():
            return
        records: list[dict[str, Any]] = [
            {key: math.nan if value is None else value for key, value in row.items()}
            for row in read_metrics(file)
        ]
        rows = [Statistics(**record) for record in records]
        for role in sorted({row.role for row in rows}):
            statistic = "sqnr" if role == GRADIENT else "row_sqnr"
            writers.heatmap(rows, self._folder / f"numerics_{role}.png", role, statistic)

    def show(self, record: dict[str, Any]) -> None:
        """Show a training step: in the progress bar, or as a line where there is no terminal.

        Args:
            record: What ``write`` takes, with loss, grad_norm, tokens_per_second and memory.
        """
        if not self._enabled:
            return
        numbers = (
            f"loss {record['loss']:.4f}  grad norm {record['grad_norm']:.3f}  "
            f"{record['tokens_per_second']:,.0f} tokens/s  {record['memory']:.2f} GiB"
        )
        step = record["step"]
        self._bar.update(self._task, completed=step, numbers=numbers)
        if not self._console.is_terminal and (step % self._log_interval == 0 or step in (1, self._steps)):
            done = step - self._first_step + 1
            eta = (time.monotonic() - self._started) / done * (self._steps - step)
            self.say(f"{self.title}  step {step}/{self._steps}  {numbers}  ETA {eta:.0f} s")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl; a last line that was cut off by a crash is left out.

    Args:
        path: The file.

    Returns:
        One dict a line.
    """
    *lines, cut_off = path.read_text().split("\n")
    del cut_off
    return [json.loads(line) for line in lines]


def peak_memory_gib(device: torch.device) -> float:
    """Give the most memory that this rank has held: of its GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
