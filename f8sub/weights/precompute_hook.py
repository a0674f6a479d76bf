"""register_precompute_hook: ``precompute_scales`` after every step of an optimizer."""

from collections.abc import Iterable
from typing import Any

import torch

from f8sub.errors import Float8ConfigError
from f8sub.weights.precompute_scales import conversions_of, enter_step, entering, parts_of, precompute_scales


def register_precompute_hook(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | Iterable[torch.nn.Module],
) -> torch.utils.hooks.RemovableHandle:
    """Call ``precompute_scales(model)`` after every ``optimizer.step()``; accelerate's wrapper is taken too.

    Returns a handle that removes the hook again.

    Raises:
        Float8ConfigError: ``convert_to_float8`` saw no model, or the optimizer steps no parameter of it.
    """
    parts = parts_of(model)
    conversions_of(parts)
    runs_hooks: Any = optimizer
    while not hasattr(runs_hooks, "_optimizer_step_post_hooks"):
        runs_hooks = runs_hooks.optimizer  # accelerate's wrapper has no hooks of its own
    stepped = {id(parameter) for group in runs_hooks.param_groups for parameter in group["params"]}
    if stepped.isdisjoint(id(parameter) for part in parts for parameter in part.parameters()):
        raise Float8ConfigError(
            f"register_precompute_hook: the {type(runs_hooks).__name__} steps no parameter of the model: it is another "
            "model's, or was made before fully_shard, which replaces parameters; make the optimizer of "
            "model.parameters() after fully_shard"
        )
    handle: torch.utils.hooks.RemovableHandle = runs_hooks.register_step_post_hook(_PrecomputeHook(parts))
    return handle


class _PrecomputeHook:
    """Precomputes scales; the optimizer's first such hook enters the step, as hooks of all optimizers run later."""

    def __init__(self, parts: list[torch.nn.Module]) -> None:
        self.parts = parts

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        hooks = optimizer._optimizer_step_post_hooks.values()
        if next(hook for hook in hooks if isinstance(hook, _PrecomputeHook)) is self:
            enter_step(optimizer, args, kwargs)
        precompute_scales(self.parts)


entering.add(_PrecomputeHook)
