"""A monitor beside torchtitan's trainer, by the option ``monitor_every``; of any version of torchtitan."""

import functools
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from f8sub.convert.checks import is_converted
from f8sub.diagnostics.monitor import Monitor
from f8sub.diagnostics.statistics import Statistics
from f8sub.diagnostics.writers import jsonl
from f8sub.gradients.reduce_gradients import GradientReduction
from f8sub.integrations.torchtitan.graphs import launch_next
from f8sub.weights.checks import gather_values

WANTED = "float8_monitor"
"""Attribute of a converted model: one step of how many is measured, and the file. Copies for pipelines keep it."""

FILE = "numerics.jsonl"

_begun: "weakref.WeakKeyDictionary[torch.nn.Module, tuple[Monitor, _File]]" = weakref.WeakKeyDictionary()
"""The monitors of parts whose first step runs: an optimizer's first step settles whose statistics go together."""


_stepped: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()
"""Parts whose first step ended."""

REDUCTIONS: "weakref.WeakKeyDictionary[torch.nn.Module, GradientReduction]" = weakref.WeakKeyDictionary()
"""The float8 reductions of a part's gradients, which are measured in the steps that are sampled."""


class _File:
    """Writes rows, with steps as the trainer counts them, from 1 on; ``path`` is settled in the first step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, step: int, rows: Sequence[Statistics]) -> None:
        jsonl(self.path)(step + 1, [row._replace(step=step + 1) for row in rows])


def monitor_from_first_forward(model: torch.nn.Module) -> None:
    """Have a monitor begin when the model, or a copy of it for a pipeline, is first called in training."""
    model.register_forward_pre_hook(_begin)
    _watch_first_steps()


@functools.cache
def _watch_first_steps() -> None:
    register_optimizer_step_pre_hook(_attach)


def _begin(model: torch.nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is _begin:
            del model._forward_pre_hooks[key]
    if any(map(is_converted, model.modules())):
        every, path = getattr(model, WANTED)
        file = _File(Path(path))
        monitor = Monitor(model, every, to=file)
        monitor.__enter__()
        _begun[model] = monitor, file


def _attach(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # The container is the one optimizer that knows the parts of the model; it steps those of each part.
    parts = [part for part in getattr(optimizer, "model_parts", ()) if hasattr(part, WANTED)]
    if not any(part in _begun for part in parts):
        return
    for part, (ranks, group) in zip(parts, _ranks_of_the_same_layers(parts), strict=True):
        if part not in _begun:  # which has no float8 layer
            continue
        monitor, file = _begun.pop(part)
        if ranks[0]:  # a later stage of a pipeline
            file.path = file.path.with_name(f"{file.path.stem}.{ranks[0]}{file.path.suffix}")
        monitor.group = group
        monitor.attach(optimizer)
        optimizer.register_step_post_hook(functools.partial(_launch_samples, monitor, part))


def _launch_samples(monitor: Monitor, part: torch.nn.Module, *step: Any) -> None:
    """Optimizer step post-hook, after the monitor's own: no graph is replayed in a step that is sampled.

    Nor is one captured in the second step: the first one is sampled and runs compiled blocks eagerly, so the second one
    compiles them, and what Triton tunes then cannot be captured.
    """
    if monitor.sampling or part not in _stepped:
        launch_next()
    _stepped.add(part)
    if monitor.sampling and part in REDUCTIONS:
        REDUCTIONS[part].measure_next()


def _ranks_of_the_same_layers(
    parts: Sequence[torch.nn.Module],
) -> list[tuple[list[int], dist.ProcessGroup | None]]:
    """The ranks of each part's stage of a pipeline, and their group; None where all ranks have the same layers."""
    if not dist.is_initialized():
        return [([0], None)] * len(parts)
    own = [[n for n, each in part.named_modules() if is_converted(each)] for part in parts]
    stages: dict[str, list[int]] = {}
    for rank, of_parts in enumerate(gather_values(own)):
        for names in of_parts:
            stages.setdefault(repr(names), []).append(rank)
    world = list(range(dist.get_world_size()))
    groups = {stage: None if ranks == world else dist.new_group(ranks) for stage, ranks in stages.items()}
    return [(stages[repr(names)], groups[repr(names)]) for names in own]
