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
SEEN, UNSEEN = "selective", "unseen"
LATER = {
    ("bf16", "bf16", 2): (8829, SEEN),
    ("tensorwise", "float8 compute", 2): (10711, UNSEEN),
    ("tensorwise", GATHERS, 2): (11148, UNSEEN),
    ("tensorwise", "+ gradients in e4m3", 2): (11486, UNSEEN),
    ("rowwise", GATHERS, 2): (10769, SEEN),
    ("rowwise", "+ gradients in e4m3", 2): (11356, SEEN),
    ("tensorwise", GATHERS, 4): (11525, UNSEEN),
    ("tensorwise", "HSDP 2x2", 4): (10924, UNSEEN),
}
"""tokens/s of runs of 2026-11-26, and of rowwise of 2026-11-24, in ``docs/performance.md`` and ``docs/scaling.md``, by
recipe, way and GPUs, and whether their policy saw float8 products. Nothing is fitted to those of four GPUs."""
MORE = {
    "float8 compute": ", all-gather in bf16",
    "+ gradients in e4m3": ", gradients in e4m3",
    "HSDP 2x2": ", HSDP 2x2",
}


@functools.cache
def predicted(model: str, gpus: int, **options: Any) -> StepEstimate:
    return f8sub.estimate_step(load(model), gpus, sequence=8192, **options)


def whole_runs() -> dict[str, float]:
    """The error of tokens/s of each run of a Llama 3 8B on H200s, two of them but where it is told; torchao's aside."""
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
    for (recipe, way, count), (speed, checkpoint) in LATER.items():
        bf16, replicas = recipe == "bf16", 2 if way == "HSDP 2x2" else 1
        estimate = predicted(
            "llama3-8b",
            count,
            gpu="H200",
            recipe="tensorwise" if bf16 else recipe,
            checkpoint=checkpoint,
            replicas=replicas,
        )
        arm = f"{count} GPUs, {recipe if bf16 else f'f8sub {recipe}'}, 8B"
        policy = "policy that sees products" if checkpoint == SEEN else "policy that sees none"
        arrived = estimate.of(count, GATHERS if way == "HSDP 2x2" else way).tokens_per_second
        found[f"{arm}, {policy}{MORE.get(way, '')}"] = arrived / speed - 1
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
