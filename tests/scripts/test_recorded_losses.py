"""Runs that others trained, as torchtitan and f8sub's trainer log them: what is read of them, and how arms compare."""

import json
import math
import statistics
from pathlib import Path

import pytest

from scripts.loss_compare import arms_of, read_run


def tensorboard(folder: Path, name: str, losses: dict[int, float]) -> Path:
    """What torchtitan leaves of a run: an event file in a folder that is named by the time."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tb" / "20260101-0000")) as writer:
        for step, loss in losses.items():
            writer.add_scalar(name, loss, step)
            writer.add_scalar("lr", 0.1, step)
    return folder


def lines(file: Path, losses: dict[int, float], held_out: float | None = None) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    records = [{"step": step, "loss": loss, "lr": 0.1} for step, loss in losses.items()]
    if held_out is not None:
        records.append({"step": max(losses), "eval_loss": held_out})
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


LOSSES = {step: 8 - step / 64 for step in range(10, 210, 10)}
"""Float32 has them exactly, as TensorBoard does."""


def test_torchtitans_tensorboard(tmp_path):
    run = read_run(tensorboard(tmp_path, "loss_metrics/global_avg_loss", LOSSES))
    assert run.training == LOSSES
    assert run.held_out is None
    assert run.final == (LOSSES[190] + LOSSES[200]) / 2  # a tenth of 20

    tensorboard(tmp_path, "validation_metrics/loss", {100: 7.0, 200: 6.5})
    run = read_run(tmp_path)
    assert run.training == LOSSES
    assert run.held_out == run.final == 6.5


def test_a_resumed_runs_later_file_counts(tmp_path):
    lines(tmp_path / "1" / "metrics.jsonl", {1: 4.0, 2: 3.0, 3: 2.0})
    lines(tmp_path / "2" / "metrics.jsonl", {3: 1.0, 4: 0.5})
    assert read_run(tmp_path).training == {1: 4.0, 2: 3.0, 3: 1.0, 4: 0.5}


def test_json_lines_by_name(tmp_path):
    assert read_run(lines(tmp_path / "any.json", LOSSES, 6.0)).final == 6.0


def test_a_run_without_losses_is_an_error_that_says_how_to_have_them(tmp_path):
    with pytest.raises(ValueError, match=r"enable_tensorboard"):
        read_run(tensorboard(tmp_path, "loss_metrics/global_max_loss", LOSSES))


def test_arms_that_cannot_be_compared(tmp_path):
    a, b, short = (
        str(lines(tmp_path / name, losses))
        for name, losses in (("a", LOSSES), ("b", LOSSES), ("short", {10: 7.0}))
    )
    held_out = str(lines(tmp_path / "held_out", LOSSES, 6.0))
    for given, says in (
        ([["float8", a], ["other", b]], "give bf16"),
        ([["bf16", a]], "at least one other"),
        ([["bf16", a], ["float8", a], ["float8", b]], "each once"),
        ([["bf16", a], ["float8", a, b]], r"'bf16': 1, 'float8': 2"),
        ([["bf16"], ["float8"]], r"'bf16': 0"),
        ([["bf16", a], ["float8", short]], "float8: logged other steps"),
        ([["bf16", a], ["float8", held_out]], "held-out loss"),
    ):
        with pytest.raises(ValueError, match=says):
            arms_of(given, "bf16")


@pytest.mark.long
def test_arms_are_compared_by_the_same_statistics_and_drawn(tmp_path, run_script):
    """Of what torchtitan logs: paired differences of 1, 2 and 3 per cent, whose interval is that of a t-test."""
    options = ["--folder", str(tmp_path)]
    ratios = {"bf16": (1.0, 1.0, 1.0), "float8": (1.01, 1.02, 1.03)}
    for arm, factors in ratios.items():
        runs = [
            tensorboard(
                tmp_path / f"{arm}_seed{seed}",
                "loss_metrics/global_avg_loss",
                {step: loss * factor * (1 + seed / 8) for step, loss in LOSSES.items()},
            )
            for seed, factor in enumerate(factors)
        ]
        options += ["--recorded", arm, *map(str, runs)]
    done = run_script("loss_compare.py", *options)
    assert done.returncode == 0, done.stderr
    assert "+1.98 ± " in done.stdout
    differences = [100 * math.log(factor) for factor in ratios["float8"]]
    half_width = 4.30265 * statistics.stdev(differences) / math.sqrt(3)
    assert done.figures["gaps"]["float8"]["gap_percent"] == pytest.approx(
        statistics.mean(differences), rel=1e-5
    )
    assert done.figures["gaps"]["float8"]["half_width_percent"] == pytest.approx(half_width, rel=1e-4)
    assert done.figures["steps"] == 200
    assert (tmp_path / "loss.png").stat().st_size > 10_000

    done = run_script("loss_compare.py", *options[:-2])
    assert done.returncode == 2
    assert "runs of each arm" in done.stderr
    assert "Traceback" not in done.stderr
