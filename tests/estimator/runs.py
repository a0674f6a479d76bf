"""Runs that were measured, and what the model says of them."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

import f8sub
from f8sub import StepEstimate
from f8sub.estimator import seconds
from f8sub.estimator.estimate import GATHERS
from f8sub.estimator.models import load

TABLES = Path(__file__).parents[2] / "scripts" / "tables"
PUBLISHED = json.loads((TABLES / "published_runs.json").read_text())
WHOLE = {
    ("bf16", "bf16", 2, "selective"): 8688,
    ("bf16", "bf16", 2, "none"): 9430,
    ("bf16", "bf16", 2, "full"): 7925,
    ("tensorwise", GATHERS, 2, "selective"): 11615,
    ("tensorwise", "+ gradients in e4m3", 2, "selective"): 11827,
    ("tensorwise", "+ gradients in e4m3", 2, "none"): 12803,
    ("tensorwise", "+ gradients in e4m3", 2, "full"): 10864,
    ("rowwise", GATHERS, 2, "selective"): 11284,
    ("rowwise", "+ gradients in e4m3", 2, "none"): 12507,
    ("bf16", "bf16", 4, "selective"): 8901,
    ("tensorwise", "float8 compute", 4, "selective"): 11310,
    ("tensorwise", GATHERS, 4, "selective"): 11869,
    ("tensorwise", "+ gradients in e4m3", 4, "selective"): 12321,
    ("bf16", "HSDP 2x2", 4, "selective"): 8563,
    ("tensorwise", "HSDP 2x2", 4, "selective"): 11034,
}
"""tokens/s of runs of 2026-11-26 on one machine, in ``docs/measurements``, by recipe, way,
GPUs and checkpointing. Nothing is fitted to those of four GPUs."""
HALF = {
    ("bf16", 1): 17130,
    ("bf16", 2): 16322,
    ("bf16", 4): 16615,
    ("tensorwise", 1): 21215,
    ("tensorwise", 2): 21108,
    ("tensorwise", 4): 21893,
}
"""The same of another machine that day, 16 of the layers with selective checkpointing, by recipe and GPUs; of one GPU
the mean of two runs."""
SHARED = {"bf16": 8265, "tensorwise": 10708}
"""The same of a third machine a day later, all layers, two ranks to each, two sequences for both."""
MORE = {
    "float8 compute": ", all-gather in bf16",
    "+ gradients in e4m3": ", gradients in e4m3",
    "HSDP 2x2": ", HSDP 2x2",
}


@functools.cache
def predicted(model: str, gpus: int, **options: Any) -> StepEstimate:
    return f8sub.estimate_step(load(model), gpus, sequence=8192, **options)


def whole_runs() -> dict[str, float]:
    """The error of tokens/s of each run of a Llama 3 8B on H200s."""
    found = {}
    for (recipe, way, count, checkpoint), speed in WHOLE.items():
        bf16, hybrid = recipe == "bf16", way == "HSDP 2x2"
        estimate = predicted(
            "llama3-8b",
            count,
            gpu="H200",
            recipe="tensorwise" if bf16 else recipe,
            checkpoint=checkpoint,
            replicas=2 if hybrid else 1,
        )
        arrived = estimate.of(count, ("bf16" if bf16 else GATHERS) if hybrid else way).tokens_per_second
        arm = recipe if bf16 else f"f8sub {recipe}"
        kept = "no" if checkpoint == "none" else checkpoint
        found[f"{count} GPUs, {arm}, {kept} checkpointing{MORE.get(way, '')}"] = arrived / speed - 1
    for (recipe, count), speed in HALF.items():
        arm, way = ("bf16", "bf16") if recipe == "bf16" else (f"f8sub {recipe}", GATHERS)
        arrived = of_half().of(count, way).tokens_per_second
        name = f"{count} GPU{'s' * (count > 1)}, {arm}, selective checkpointing, 16 layers"
        found[name] = arrived / speed - 1
    shared = predicted("llama3-8b", 4, gpu="H200", tensor_parallel=2, tokens=16384)
    for recipe, speed in SHARED.items():
        arm, way = ("bf16", "bf16") if recipe == "bf16" else (f"f8sub {recipe}", GATHERS)
        arrived = shared.of(4, way).tokens_per_second
        found[f"4 GPUs, {arm}, selective checkpointing, TP 2, two sequences"] = arrived / speed - 1
    return found


@functools.cache
def of_half() -> StepEstimate:
    model: Any = load("llama3-8b")
    del model.layers[16:]
    counts = sorted({count for _, count in HALF})
    return f8sub.estimate_step(model, counts, gpu="H200", sequence=8192, checkpoint="selective")


@functools.cache
def of_torchao(model: str, gpus: int, **options: Any) -> StepEstimate:
    """As ``predicted``, with FSDP2's own copies: f8sub's are not there for weights of torchao."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OWN_COPY_IN", "UNROUNDED"):
            patch.setattr(seconds, name, seconds.COPY_IN)
        patch.setattr(seconds, "OWN_COPIES_OUT", 2)
        return f8sub.estimate_step(load(model), gpus, sequence=8192, **options)


def published(run: dict[str, Any]) -> StepEstimate:
    options = {name: run[name] for name in ("gpu", "tensor_parallel", "tokens", "checkpoint")}
    return of_torchao(run["model"], run["gpus"], recipe="tensorwise", **options)


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
