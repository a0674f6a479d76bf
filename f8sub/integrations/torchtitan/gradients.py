"""Float8 reductions of gradients, set up when a model is first called; of any version of torchtitan."""

from typing import Any

import torch
import torch.distributed as dist

from f8sub.gradients.reduce_gradients import reduce_gradients_in_float8
from f8sub.integrations.torchtitan.numerics import REDUCTIONS, WANTED


def reduce_from_first_forward(model: torch.nn.Module) -> None:
    """Have the gradients of a model, and of each copy for a pipeline, reduced in float8 from when it is first called.

    torchtitan shards it after it was converted, and tells nobody. A job of one rank reduces nothing. Where a monitor is
    wanted, it has their errors, too.
    """
    model.register_forward_pre_hook(_reduce)


def _reduce(model: torch.nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is _reduce:
            del model._forward_pre_hooks[key]
    if dist.is_initialized() and dist.get_world_size() > 1:
        every, _ = getattr(model, WANTED, (0, ""))
        REDUCTIONS[model] = reduce_gradients_in_float8(model, measure=every > 0, measure_every=max(1, every))
