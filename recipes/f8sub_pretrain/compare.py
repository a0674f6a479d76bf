"""Train the same job in several ways, on the same data from the same seed, and show what differs.

In float8 and in bf16, or with gradients that are reduced in float32, in bfloat16 and in float8.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import shlex
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import f8sub
from f8sub_pretrain.metrics import read_metrics
from f8sub_pretrain.model import has_experts_in_float8
from f8sub_pretrain.settings import Settings

_FINAL_STEPS = 10
"""A run's final loss is the mean over so many last steps."""

_SMOOTH_STEPS = 20
"""Curves show the mean over so many steps."""

_QUICK_START, _QUICK_START_NOISE = ("debug", 100, 3e-3), 2.1
"""Model size, steps and learning rate of recipes/pretrain.toml, and by how many per cent rounding alone moves the loss
of such a run in bf16. Source: docs/measurements/numerics.md."""

_FIRST_FLOAT8_GPU = (8, 9)
"""The compute capability of Ada, the first NVIDIA GPU that multiplies float8."""

Records = list[dict[str, Any]]
"""metrics.jsonl of a run."""


def runs_of(settings: Settings) -> tuple[dict[str, Settings], str]:
    """Give the runs that are compared by name, and the name of the one that the others are compared with.

    Args:
        settings: What they have in common.

    Returns:
        Both; in the order in which they are trained.
    """
    float8 = settings.float8
    if settings.compare == "bf16":
        return {float8.recipe: settings, "bf16": settings.without_float8()}, "bf16"
    apart = dataclasses.replace(settings, float8=dataclasses.replace(float8, gradients=False))
    coded = dataclasses.replace(settings, float8=dataclasses.replace(float8, gradients=True))
    float32 = dataclasses.replace(settings.training, reduce_dtype="float32")
    bfloat16 = dataclasses.replace(settings.training, reduce_dtype="bfloat16")
    runs = {
        "float32": dataclasses.replace(apart, training=float32),
        "bfloat16": dataclasses.replace(apart, training=bfloat16),
        "float8": dataclasses.replace(coded, training=float32),
    }
    return runs, "float32"


def compare(settings: Settings, train: Callable[[Settings, str], bool]) -> None:
    """Train each run and write loss.png and summary.json to the dump folder; rank 0 prints a table.

    Args:
        settings: What is compared, and what the runs have in common.
        train: Trains one run under a title; gives whether it came to its last step.
    """
    folder = Path(settings.job.dump_folder)
    runs, baseline = runs_of(settings)
    records: dict[str, Records] = {}
    for name, run in runs.items():
        place = folder / name
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        placed = dataclasses.replace(run, job=dataclasses.replace(run.job, dump_folder=str(place)))
        if not train(placed, name if settings.compare == "bf16" else f"gradients in {name}"):
            return
        gc.collect()
        torch.compiler.reset()
        if dist.get_rank() == 0:
            records[name] = read_metrics(place / "metrics.jsonl")
    if dist.get_rank() == 0:
        device = "cuda" if "nccl" in dist.get_backend() else "cpu"
        until = settings.float8.until_step
        about = {
            "recipe": settings.float8_recipe,
            "steps": len(_train(records[baseline])),
            "until_step": until,
            "ranks": dist.get_world_size(),
            "device": device,
            "seed": settings.training.seed,
            "torch": torch.__version__,
            "f8sub": f8sub.__version__,
        }
        noise = noise_of(settings)
        figures = summarize(records, baseline, noise)
        summary = folder / "summary.json"
        summary.write_text(json.dumps({"runs": figures, "run": about}, indent=1) + "\n")
        plot = folder / "loss.png"
        draw(records, baseline, noise, plot, until)
        by = "" if settings.compare == "bf16" else ", by what gradients are reduced in"
        ends = f", in float8 until step {until}" if until else ""
        show(figures, about, f"{about['steps']} steps{by}{ends}")
        lines = [f"Loss curves: {plot}", f"Summary:     {summary}"]
        if settings.compare == "bf16":
            lines += [f"Next:        {line}" for line in commands(settings, folder / settings.float8.recipe)]
        lines += ["", hardware(), result(figures, baseline)]
        Console(soft_wrap=True).print("\n".join(lines), highlight=False, markup=False)


def hardware() -> str:
    """Say in words whether this machine has float8 units."""
    if not torch.cuda.is_available():
        return (
            "This machine: CPU, no float8 units. It emulates float8, so float8 is slower than bf16 here; losses and "
            "bytes are those of a GPU."
        )
    has_units = torch.cuda.get_device_capability() >= _FIRST_FLOAT8_GPU
    units = "with float8 units." if has_units else "no float8 units, so float8 is slower than bf16 here."
    return f"This machine: {torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {units}"


def result(figures: dict[str, dict[str, Any]], baseline: str) -> str:
    """Give one line that says how the runs differ.

    Args:
        figures: Those of summary.json by run.
        baseline: The run that gaps are relative to.

    Returns:
        The line: loss, gap with its noise and what that means, and bytes of each other run.
    """
    of_baseline, parts = figures[baseline], []
    for name, run in figures.items():
        if name == baseline:
            continue
        gap, noise = run["loss_gap_percent"], run["loss_gap_noise_percent"]
        if noise is None:
            meaning = " with one seed, whose noise is not known (scripts/loss_compare.py takes several)"
        else:
            within = "within" if abs(gap) <= noise else "more than"
            meaning = f", {within} what rounding alone does to one run (± {noise:.1f} %)"
        sent = (
            "all_gather_bytes"
            if run["all_gather_bytes"] != of_baseline["all_gather_bytes"]
            else "reduced_bytes"
        )
        what = "weight" if sent == "all_gather_bytes" else "gradient"
        # One rank sends nothing.
        share = (
            f" It sent {run[sent] / of_baseline[sent]:.2f} of the {what} bytes." if of_baseline[sent] else ""
        )
        parts.append(
            f"{name} ends at loss {run['loss']:.3f}, {baseline} at {of_baseline['loss']:.3f}: {gap:+.1f} %"
            f"{meaning}.{share}"
        )
    return f"Result: {' '.join(parts)}"


def commands(settings: Settings, run: Path) -> list[str]:
    """Give lines on what to do next: add f8sub to a script, look at the machine and the numerics, serve the weights.

    Args:
        settings: Of the float8 run.
        run: Its folder.

    Returns:
        The lines; what the run did not write is not named.
    """
    shown = [
        'add three calls to your own script: README.md, section "Train"',
        "python -m f8sub doctor: which recipes are fast on this machine",
    ]
    if list(run.glob("numerics_*.png")):
        shown.append(f"{run}/numerics_*.png: what float8 did to each layer")
    saved = sorted((run / "checkpoints").glob("step-*"))
    if saved and _has_codes_for_engines(settings):
        float8, options = settings.float8, ""
        if float8.skip:
            options += " ".join(["", "--skip", *map(shlex.quote, float8.skip)])
        options += "" if float8.skip_defaults else " --no-skip-defaults"
        options += " --experts" if has_experts_in_float8(settings) else ""
        export = f"python -m f8sub export {saved[-1]} {run}/served --recipe {float8.recipe}{options}"
        shown.append(f"{export}: a checkpoint for inference engines")
    return shown


def _has_codes_for_engines(settings: Settings) -> bool:
    """Whether a checkpoint tells all codes: neither amax histories nor several recipes."""
    float8, recipe = settings.float8, f8sub.get_recipe(settings.float8.recipe)
    weights = recipe.fprop.b
    return (
        recipe.delayed is None
        and not float8.layer_recipes
        and weights is not None
        and not weights.scale_rule.has_global  # NVFP4, which no layout holds
    )


def noise_of(settings: Settings) -> float | None:
    """Give by how many per cent rounding alone moves the final loss of such a run; None where that was not measured."""
    shape = settings.model.size, settings.training.steps, settings.optimizer.lr
    return _QUICK_START_NOISE if shape == _QUICK_START and settings.compare == "bf16" else None


def summarize(
    records: dict[str, Records], baseline: str, noise: float | None = None
) -> dict[str, dict[str, Any]]:
    """Give the figures of a comparison.

    Args:
        records: metrics.jsonl of each run.
        baseline: The run that gaps are relative to.
        noise: What rounding alone does to the gap, in %; None if it is not known.

    Returns:
        By run, the figures of summary.json. Bytes and all-reduces are means over steps, which may end in bf16, and
        tokens a second their median; the first step is left out.
    """
    return {title: _figures(run, records[baseline], noise) for title, run in records.items()}


def _figures(run: Records, baseline: Records, noise: float | None) -> dict[str, Any]:
    loss, right = _final_loss(run), _final_loss(baseline)
    held_out = [record["eval_loss"] for record in run if "eval_loss" in record]
    return {
        "loss_first": _train(run)[0]["loss"],
        "loss": loss,
        "loss_gap_percent": 100 * (loss - right) / right,
        "loss_gap_noise_percent": None if run is baseline else noise,
        "eval_loss": held_out[-1] if held_out else None,
        "all_gather_bytes": statistics.mean(_of_steps(run, "all_gather_bytes")),
        "reduced_bytes": statistics.mean(_of_steps(run, "reduced_bytes")),
        "amax_all_reduces": statistics.mean(_of_steps(run, "amax_all_reduces")),
        "tokens_per_second": statistics.median(_of_steps(run, "tokens_per_second")),
        "memory": max(record["memory"] for record in _train(run)),
    }


def smooth(values: list[float]) -> list[float]:
    """Give the mean of each value and those before it, at most ``_SMOOTH_STEPS`` of them."""
    windows = (values[max(0, end - _SMOOTH_STEPS) : end] for end in range(1, len(values) + 1))
    return [statistics.fmean(window) for window in windows]


def gaps(run: Records, baseline: Records) -> list[float]:
    """Give the distance of a run's loss from the baseline's at each step, in %."""
    pairs = zip(_train(run), _train(baseline), strict=True)
    return [100 * (one["loss"] - other["loss"]) / other["loss"] for one, other in pairs]


def draw(records: dict[str, Records], baseline: str, noise: float | None, path: Path, until: int = 0) -> None:
    """Draw the loss curves, and below them the gaps with their noise: each step faint, the mean of steps strong.

    Args:
        records: metrics.jsonl of each run.
        baseline: The run that gaps are relative to.
        noise: What rounding alone does to a gap, in %: a band around 0.
        path: PNG file to write.
        until: The last step in float8: a line; 0 for none.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    figure.suptitle(f"Training loss, same data and seed ({_SMOOTH_STEPS}-step means)")
    FigureCanvasAgg(figure)
    losses, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    others = iter(("tab:blue", "tab:orange"))
    for name, run in records.items():
        color = "tab:gray" if name == baseline else next(others)
        steps, values = zip(*((record["step"], record["loss"]) for record in _train(run)), strict=True)
        losses.plot(steps, values, color, alpha=0.25, linewidth=0.8)
        losses.plot(steps, smooth(list(values)), color, label=name)
        held_out = [record for record in run if "eval_loss" in record]
        losses.plot(
            [r["step"] for r in held_out], [r["eval_loss"] for r in held_out], "o", color=color, mfc="none"
        )
        if name != baseline:
            gap = gaps(run, records[baseline])
            below.plot(steps, gap, color, alpha=0.25, linewidth=0.8)
            below.plot(steps, smooth(gap), color)
    losses.plot([], [], "ko", mfc="none", label="evaluation")
    if until:
        losses.axvline(until, color="tab:gray", linestyle=":", linewidth=0.8, label="last step in float8")
        below.axvline(until, color="tab:gray", linestyle=":", linewidth=0.8)
    losses.set_ylabel("loss")
    losses.legend()
    below.axhline(0, color="tab:gray", linewidth=0.8)
    below.set_ylabel(f"gap, % of {baseline}")
    below.set_xlabel("step")
    if noise is not None:
        below.axhspan(-noise, noise, color="tab:gray", alpha=0.15, linewidth=0)
        below.set_xlabel("step; the band is what rounding alone does to one run")
    figure.savefig(path, dpi=120)


def show(figures: dict[str, dict[str, Any]], about: dict[str, Any], title: str) -> None:
    """Print a table of all runs.

    Args:
        figures: Those of summary.json by run.
        about: What summary.json says of the runs.
        title: Of the table.
    """
    table = Table("", *figures, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    rows = {
        "first loss": ("loss_first", ".4f"),
        f"final loss (mean of last {min(_FINAL_STEPS, about['steps'])})": ("loss", ".4f"),
        "gap, %": ("loss_gap_percent", "+.2f"),
        "noise of one run, ± %": ("loss_gap_noise_percent", ".2f"),
        "evaluation loss": ("eval_loss", ".4f"),
        "bytes all-gathered per step": ("all_gather_bytes", ",.0f"),
        "gradient bytes per step": ("reduced_bytes", ",.0f"),
        "amax all-reduces per step": ("amax_all_reduces", "g"),
        "tokens per second": ("tokens_per_second", ",.0f"),
        "peak memory per GPU, GiB": ("memory", ".2f"),
    }
    if about["device"] == "cpu":
        rows.popitem()  # of a CPU it is the process's, which all runs share
    for name, (key, form) in rows.items():
        values = [figures_of[key] for figures_of in figures.values()]
        if any(value is not None for value in values):
            table.add_row(name, *("" if value is None else format(value, form) for value in values))
    Console().print(table)


def _train(records: Records) -> Records:
    return [record for record in records if "loss" in record]


def _final_loss(records: Records) -> float:
    last: list[float] = [record["loss"] for record in _train(records)[-_FINAL_STEPS:]]
    return sum(last) / len(last)


def _of_steps(records: Records, key: str) -> list[float]:
    steps = _train(records)
    return [record[key] for record in steps[1:] or steps]
