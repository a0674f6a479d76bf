"""A monitor beside torchtitan's trainer, by the option ``monitor_every``; of any version of torchtitan."""

import functools
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from f8sub.features.monitor.monitor import Monitor
from f8sub.features.monitor.statistics import Statistics
from f8sub.features.monitor.writers import Writer, jsonl
from f8sub.linear.float8_linear import Float8Linear
from f8sub.weights.ranks import gather_values

WANTED = "float8_monitor"
"""Attribute of a converted model: one step of how many is measured, and the file. Copies for pipelines keep it."""

FILE = "numerics.jsonl"

_attached: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


@functools.cache
def monitor_at_first_step() -> None:
    """Have a monitor begin at the first step of torchtitan's optimizers, when all parallelism is applied."""
    register_optimizer_step_pre_hook(_begin)


def _begin(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # The container is the one optimizer that knows the parts of the model; it steps those of each part.
    parts = [part for part in getattr(optimizer, "model_parts", ()) if hasattr(part, WANTED)]
    if not parts or optimizer in _attached:
        return
    _attached.add(optimizer)
    every, file = getattr(parts[0], WANTED)
    ranks, group = _ranks_of_the_same_layers(parts)
    path = Path(file)
    if ranks[0]:  # a later stage of a pipeline
        path = path.with_name(f"{path.stem}.{ranks[0]}{path.suffix}")
    model = parts[0] if len(parts) == 1 else torch.nn.ModuleList(parts)
    Monitor(model, every, to=_counted_from_1(jsonl(path)), group=group).attach(optimizer)


def _counted_from_1(write: Writer) -> Writer:
    """The steps as the trainer counts them."""

    def counted(step: int, rows: Sequence[Statistics]) -> None:
        write(step + 1, [row._replace(step=step + 1) for row in rows])

    return counted


def _ranks_of_the_same_layers(parts: Sequence[torch.nn.Module]) -> tuple[list[int], dist.ProcessGroup | None]:
    """The ranks of this stage of a pipeline, and their group; None where all ranks have the same layers."""
    if not dist.is_initialized():
        return [0], None
    own = [name for part in parts for name, each in part.named_modules() if isinstance(each, Float8Linear)]
    everyones = gather_values(own)
    stages: dict[str, list[int]] = {}
    for rank, names in enumerate(everyones):
        stages.setdefault(repr(names), []).append(rank)
    if len(stages) == 1:
        return list(range(len(everyones))), None
    groups = {stage: dist.new_group(ranks) for stage, ranks in stages.items()}
    return stages[repr(own)], groups[repr(own)]
