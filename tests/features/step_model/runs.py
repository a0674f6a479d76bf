"""Runs that were measured, and what the model says of them."""

import functools
import json
from pathlib import Path
from typing import Any

import f8sub
from f8sub.features.named_models.load import load
from f8sub.features.step_model.estimate_step import GATHERS, StepEstimate

TABLES = Path(__file__).parents[3] / "scripts" / "tables"
WHOLE = json.loads((Path(__file__).parent / "whole_runs_h200.json").read_text())
PUBLISHED = json.loads((TABLES / "published_runs.json").read_text())
CHECKPOINTS = {"8B, selective checkpointing": "unseen", "8B, no checkpointing": "none"}
LATER = {
    ("bf16", "bf16"): 8829,
    ("tensorwise", "float8 compute"): 10711,
    ("tensorwise", GATHERS): 11148,
    ("tensorwise", "+ gradients in e4m3"): 11486,
    ("rowwise", GATHERS): 10769,
    ("rowwise", "+ gradients in e4m3"): 11356,
}
"""tokens/s of the runs of 2026-11-26, and of rowwise of 2026-11-24, in ``docs/performance.md``: their policy sees
float8 products."""


@functools.cache
def predicted(model: str, gpus: int, **options: Any) -> StepEstimate:
    return f8sub.estimate_step(load(model), gpus, sequence=8192, **options)


def whole_runs() -> dict[str, float]:
    """The error of tokens/s of each run of a Llama 3 8B on two H200s, torchao's aside."""
    found = {}
    for arm, speeds in WHOLE["tokens_per_second"].items():
        library, _, recipe = arm.rpartition(" ")
        for setting, checkpoint in CHECKPOINTS.items():
            if setting not in speeds or library == "torchao":
                continue
            name = recipe if library else "tensorwise"
            estimate = predicted("llama3-8b", 2, gpu="H200", recipe=name, checkpoint=checkpoint)
            way = GATHERS if library else "bf16"
            found[f"{arm}, {setting}"] = estimate.of(2, way).tokens_per_second / speeds[setting] - 1
    for (recipe, way), speed in LATER.items():
        name = "tensorwise" if recipe == "bf16" else recipe
        estimate = predicted("llama3-8b", 2, gpu="H200", recipe=name, checkpoint="selective")
        arm = "bf16" if recipe == "bf16" else f"f8sub {recipe}"
        more = {"float8 compute": ", all-gather in bf16", "+ gradients in e4m3": ", gradients in e4m3"}
        found[f"{arm}, 8B, policy that sees products{more.get(way, '')}"] = (
            estimate.of(2, way).tokens_per_second / speed - 1
        )
    return found


def published(run: dict[str, Any]) -> StepEstimate:
    options = {name: run[name] for name in ("gpu", "tensor_parallel", "tokens", "checkpoint")}
    return predicted(run["model"], run["gpus"], recipe="tensorwise", **options)


def speed_ups() -> dict[str, float]:
    """The error of each published speed-up."""
    return {
        f"{run['run']}: {way}": published(run).of(run["gpus"], way).over_bf16 / ratio - 1
        for run in PUBLISHED
        for way, ratio in run["over_bf16"].items()
    }


def rates() -> dict[str, float]:
    """The error of the tokens/s in bf16 of each published run."""
    return {
        run["run"]: published(run).of(run["gpus"], "bf16").tokens_per_second / run["bf16_tokens_per_second"]
        - 1
        for run in PUBLISHED
    }
