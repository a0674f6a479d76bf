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
from f8sub_pretrain.model import SIZES
from f8sub_pretrain.settings import Settings

_FINAL_STEPS = 10
"""A run's final loss is the mean over so many last steps."""

ON_A_CPU = (
    "A CPU has no float8 units, so it emulates float8 and is slower with it than with bf16.\n"
    "Losses and bytes are those of a GPU run; for speed, run this on two GPUs with float8 units."
)

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
        plain = dataclasses.replace(float8, enabled=False, gradients=False)
        return {float8.recipe: settings, "bf16": dataclasses.replace(settings, float8=plain)}, "bf16"
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
        about = {
            "recipe": settings.float8_recipe,
            "steps": len(_train(records[baseline])),
            "ranks": dist.get_world_size(),
            "device": device,
            "seed": settings.training.seed,
            "torch": torch.__version__,
            "f8sub": f8sub.__version__,
        }
        figures = summarize(records, baseline)
        summary = folder / "summary.json"
        summary.write_text(json.dumps({"runs": figures, "run": about}, indent=1) + "\n")
        plot = folder / "loss.png"
        draw(records, baseline, plot)
        by = "" if settings.compare == "bf16" else ", by what gradients are reduced in"
        show(figures, about, f"{about['steps']} steps{by}")
        last = f"Loss curves: {plot}\nSummary:     {summary}\n"
        if settings.compare == "bf16":
            last += (
                "Next:        the three calls that your own training script needs are at the top of README.md\n"
                f"On this run: {commands(settings, folder / settings.float8.recipe)}"
            )
        Console(soft_wrap=True).print(last.rstrip(), highlight=False)


def commands(settings: Settings, run: Path) -> str:
    """Give one line on what to do with a float8 run: look at the machine, look at the numerics, serve the weights.

    Args:
        settings: Of the float8 run.
        run: Its folder.

    Returns:
        The line; what the run did not write is not named.
    """
    shown = ["python -m f8sub doctor"]
    if list(run.glob("numerics_*.png")):
        shown.append(f"{run}/numerics_*.png (f8sub.Monitor)")
    saved = sorted((run / "checkpoints").glob("step-*"))
    if saved and _has_codes_for_engines(settings):
        float8, options = settings.float8, ""
        if float8.skip:
            options += " ".join(["", "--skip", *map(shlex.quote, float8.skip)])
        options += "" if float8.skip_defaults else " --no-skip-defaults"
        options += " --experts" if float8.experts and _is_mixture(settings) else ""
        export = f"python -m f8sub export {saved[-1]} {run}/served --recipe {float8.recipe}{options}"
        shown.append(f"{export} (f8sub.save_float8's codes)")
    return " · ".join(shown)


def _is_mixture(settings: Settings) -> bool:
    return "num_experts" in SIZES[settings.model.size]


def _has_codes_for_engines(settings: Settings) -> bool:
    """Whether a checkpoint tells all codes: not amax histories, several recipes, which experts "auto" chose."""
    float8, recipe = settings.float8, f8sub.get_recipe(settings.float8.recipe)
    weights = recipe.fprop.b
    return (
        recipe.delayed is None
        and not float8.layer_recipes
        and not (float8.experts == "auto" and _is_mixture(settings))
        and weights is not None
        and not weights.scale_rule.has_global  # NVFP4, which no layout holds
    )


def summarize(records: dict[str, Records], baseline: str) -> dict[str, dict[str, Any]]:
    """Give the figures of a comparison.

    Args:
        records: metrics.jsonl of each run.
        baseline: The run that gaps are relative to.

    Returns:
        By run, the figures of summary.json. Bytes, all-reduces and tokens a second are the medians of steps, the first
        one left out.
    """
    return {title: _figures(run, records[baseline]) for title, run in records.items()}


def _figures(run: Records, baseline: Records) -> dict[str, Any]:
    loss, right = _final_loss(run), _final_loss(baseline)
    held_out = [record["eval_loss"] for record in run if "eval_loss" in record]
    return {
        "loss_first": _train(run)[0]["loss"],
        "loss": loss,
        "loss_gap_percent": 100 * (loss - right) / right,
        "eval_loss": held_out[-1] if held_out else None,
        "all_gather_bytes": _per_step(run, "all_gather_bytes"),
        "reduced_bytes": _per_step(run, "reduced_bytes"),
        "amax_all_reduces": _per_step(run, "amax_all_reduces"),
        "tokens_per_second": _per_step(run, "tokens_per_second"),
        "memory": max(record["memory"] for record in _train(run)),
    }


def draw(records: dict[str, Records], baseline: str, path: Path) -> None:
    """Draw the loss curves, and below them the gaps.

    Args:
        records: metrics.jsonl of each run.
        baseline: The run that gaps are relative to.
        path: PNG file to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    figure.suptitle("Training loss, same data and seed")
    FigureCanvasAgg(figure)
    losses, gaps = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    others = iter(("tab:blue", "tab:orange"))
    for name, run in records.items():
        color = "tab:gray" if name == baseline else next(others)
        steps = [record["step"] for record in _train(run)]
        losses.plot(steps, [record["loss"] for record in _train(run)], color, label=name)
        held_out = [record for record in run if "eval_loss" in record]
        losses.plot(
            [r["step"] for r in held_out], [r["eval_loss"] for r in held_out], "o", color=color, mfc="none"
        )
        if name != baseline:
            pairs = zip(_train(run), _train(records[baseline]), strict=True)
            gaps.plot(steps, [100 * (a["loss"] - b["loss"]) / b["loss"] for a, b in pairs], color)
    losses.plot([], [], "ko", mfc="none", label="evaluation")
    losses.set_ylabel("loss")
    losses.legend()
    gaps.axhline(0, color="tab:gray", linewidth=0.8)
    gaps.set_ylabel(f"gap, % of {baseline}")
    gaps.set_xlabel("step")
    figure.savefig(path, dpi=120)


def show(figures: dict[str, dict[str, Any]], about: dict[str, Any], title: str) -> None:
    """Print a table of all runs.

    Args:
        figures: Those of summary.json by run.
        about: What summary.json says of the runs.
        title: Of the table.
    """
    on_a_cpu = about["device"] == "cpu"
    table = Table("", *figures, title=title, caption=ON_A_CPU if on_a_cpu else None)
    for column in table.columns[1:]:
        column.justify = "right"
    rows = {
        "first loss": ("loss_first", ".4f"),
        f"final loss (mean of last {min(_FINAL_STEPS, about['steps'])})": ("loss", ".4f"),
        "gap, %": ("loss_gap_percent", "+.2f"),
        "evaluation loss": ("eval_loss", ".4f"),
        "bytes all-gathered a step": ("all_gather_bytes", ",.0f"),
        "gradient bytes a step": ("reduced_bytes", ",.0f"),
        "amax all-reduces a step": ("amax_all_reduces", "g"),
        "tokens a second": ("tokens_per_second", ",.0f"),
        "peak memory of a GPU, GiB": ("memory", ".2f"),
    }
    if on_a_cpu:
        rows.popitem()  # of a CPU it is the process's, which all runs share
    for name, (key, form) in rows.items():
        values = [figures_of[key] for figures_of in figures.values()]
        if None not in values:
            table.add_row(name, *(format(value, form) for value in values))
    Console().print(table)


def _train(records: Records) -> Records:
    return [record for record in records if "loss" in record]


def _final_loss(records: Records) -> float:
    last: list[float] = [record["loss"] for record in _train(records)[-_FINAL_STEPS:]]
    return sum(last) / len(last)


def _per_step(records: Records, key: str) -> float:
    steps = _train(records)
    values: list[float] = [record[key] for record in steps[1:] or steps]
    return statistics.median(values)
