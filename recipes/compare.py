"""Train in float8 and in bf16 on the same data from the same seed, and show what float8 changed."""

from __future__ import annotations

import dataclasses
import gc
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from metrics import read_metrics
from model import SIZES
from rich.console import Console
from rich.table import Table
from settings import Settings

import f8sub

_FINAL_STEPS = 10
"""A run's final loss is the mean over so many last steps."""

ON_A_CPU = (
    "A CPU has no float8 units, so it emulates float8 and is slower with it than with bf16.\n"
    "Losses and bytes are those of a GPU run; for speed, run this on two GPUs with float8 units."
)


def compare(settings: Settings, train: Callable[[Settings, str], bool]) -> None:
    """Train twice and write loss.png and summary.json to the dump folder; rank 0 prints a table.

    Args:
        settings: Of the float8 run; the other one differs in float8 alone.
        train: Trains one run under a title; gives whether it came to its last step.
    """
    folder = Path(settings.job.dump_folder)
    runs = {
        settings.float8.recipe: settings.float8,
        "bf16": dataclasses.replace(settings.float8, enabled=False),
    }
    records: dict[str, list[dict[str, Any]]] = {}
    for title, float8 in runs.items():
        place = dataclasses.replace(settings.job, dump_folder=str(folder / title))
        if not train(dataclasses.replace(settings, float8=float8, job=place), title):
            return
        gc.collect()
        torch.compiler.reset()
        if dist.get_rank() == 0:
            records[title] = read_metrics(folder / title / "metrics.jsonl")
    if dist.get_rank() == 0:
        float8_run, bf16_run = records.values()
        summary = summarize(float8_run, bf16_run)
        summary["run"] = {
            "recipe": settings.float8.recipe,
            "steps": len(_train(float8_run)),
            "ranks": dist.get_world_size(),
            "device": "cuda" if "nccl" in dist.get_backend() else "cpu",
            "seed": settings.training.seed,
            "torch": torch.__version__,
            "f8sub": f8sub.__version__,
        }
        (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        plot = folder / "loss.png"
        draw(float8_run, bf16_run, settings.float8.recipe, plot)
        show(float8_run, bf16_run, summary)
        Console(soft_wrap=True).print(
            f"Loss curves: {plot}\nSummary:     {folder / 'summary.json'}\n"
            "Next:        the three calls that your own training script needs are at the top of README.md\n"
            f"On this run: {commands(settings, folder / settings.float8.recipe)}",
            highlight=False,
        )


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


def summarize(float8: list[dict[str, Any]], bf16: list[dict[str, Any]]) -> dict[str, Any]:
    """Give the figures of a comparison.

    Args:
        float8: metrics.jsonl of the float8 run.
        bf16: metrics.jsonl of the bf16 run.

    Returns:
        The figures of summary.json. Bytes and all-reduces are those of one step, the first one left out.
    """
    final_float8, final_bf16 = _final_loss(float8), _final_loss(bf16)
    return {
        "loss_first": _train(float8)[0]["loss"],
        "loss_float8": final_float8,
        "loss_bf16": final_bf16,
        "loss_gap_percent": 100 * (final_float8 - final_bf16) / final_bf16,
        "all_gather_bytes_float8": _per_step(float8, "all_gather_bytes"),
        "all_gather_bytes_bf16": _per_step(bf16, "all_gather_bytes"),
        "amax_all_reduces_per_step": _per_step(float8, "amax_all_reduces"),
    }


def draw(float8: list[dict[str, Any]], bf16: list[dict[str, Any]], recipe: str, path: Path) -> None:
    """Draw both loss curves, and below them the gap.

    Args:
        float8: metrics.jsonl of the float8 run.
        bf16: metrics.jsonl of the bf16 run.
        recipe: Name of the float8 recipe.
        path: PNG file to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    figure.suptitle(f"Training loss in float8 ({recipe}) and in bf16, same data and seed")
    FigureCanvasAgg(figure)
    losses, gap = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for records, name, color in ((bf16, "bf16", "tab:gray"), (float8, f"float8 {recipe}", "tab:blue")):
        losses.plot(
            [r["step"] for r in _train(records)], [r["loss"] for r in _train(records)], color, label=name
        )
        held_out = [r for r in records if "eval_loss" in r]
        losses.plot(
            [r["step"] for r in held_out], [r["eval_loss"] for r in held_out], "o", color=color, mfc="none"
        )
    losses.plot([], [], "ko", mfc="none", label="evaluation")
    losses.set_ylabel("loss")
    losses.legend()
    pairs = list(zip(_train(float8), _train(bf16), strict=True))
    gap.plot(
        [a["step"] for a, _ in pairs],
        [100 * (a["loss"] - b["loss"]) / b["loss"] for a, b in pairs],
        "tab:blue",
    )
    gap.axhline(0, color="tab:gray", linewidth=0.8)
    gap.set_ylabel("gap, % of bf16")
    gap.set_xlabel("step")
    figure.savefig(path, dpi=120)


def show(float8: list[dict[str, Any]], bf16: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Print a table of both runs.

    Args:
        float8: metrics.jsonl of the float8 run.
        bf16: metrics.jsonl of the bf16 run.
        summary: The figures of summary.json.
    """
    run = summary["run"]
    caption = ON_A_CPU if run["device"] == "cpu" else None
    table = Table("", f"float8 {run['recipe']}", "bf16", title=f"{run['steps']} steps", caption=caption)
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("first loss", f"{_train(float8)[0]['loss']:.4f}", f"{_train(bf16)[0]['loss']:.4f}")
    final = f"final loss (mean of last {min(_FINAL_STEPS, len(_train(float8)))})"
    table.add_row(final, f"{summary['loss_float8']:.4f}", f"{summary['loss_bf16']:.4f}")
    table.add_row("gap", f"{summary['loss_gap_percent']:+.2f} %", "")
    held_out = [[r["eval_loss"] for r in records if "eval_loss" in r] for records in (float8, bf16)]
    if all(held_out):
        table.add_row("evaluation loss", *(f"{losses[-1]:.4f}" for losses in held_out))
    gathered = [summary["all_gather_bytes_float8"], summary["all_gather_bytes_bf16"]]
    table.add_row("bytes all-gathered a step", *(f"{count:,.0f}" for count in gathered))
    reduces = [summary["amax_all_reduces_per_step"], _per_step(bf16, "amax_all_reduces")]
    table.add_row("amax all-reduces a step", *(f"{count:g}" for count in reduces))
    rates = [_per_step(records, "tokens_per_second") for records in (float8, bf16)]
    table.add_row("tokens a second", *(f"{rate:,.0f}" for rate in rates))
    Console().print(table)


def _train(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if "loss" in record]


def _final_loss(records: list[dict[str, Any]]) -> float:
    last: list[float] = [record["loss"] for record in _train(records)[-_FINAL_STEPS:]]
    return sum(last) / len(last)


def _per_step(records: list[dict[str, Any]], key: str) -> float:
    steps = _train(records)
    counted: list[float] = [record[key] for record in steps[1:] or steps]
    mean = sum(counted) / len(counted)
    return int(mean) if mean == int(mean) else mean
