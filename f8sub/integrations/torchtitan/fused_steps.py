"""Clipping and AdamW of torchtitan's trainer in one pass: ``f8sub.optim.fuse_step`` of each optimizer it makes.

torchtitan clips by a function of its own, which knows pipelines and experts. It goes on to put the norm together; what
it would then multiply gradients by is left to the steps.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from f8sub.errors import Float8ConfigError
from f8sub.optim import fuse_step

FUSED = "float8_fused_step"
"""Attribute of a converted model: whether its optimizer steps in one pass. Copies for pipeline stages keep it."""

_TRAINERS_CLIPPING = "torchtitan.distributed.utils"


@functools.cache
def fuse_at_first_step() -> None:
    """Fuse the steps of torchtitan's optimizers when its container first steps; before that nobody is shown them."""
    register_optimizer_step_pre_hook(_fuse)


def _fuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    parts = getattr(optimizer, "model_parts", ())
    if not any(getattr(part, FUSED, False) for part in parts):
        return
    for part in parts:
        # The container steps for good: later steps are none of this hook's business.
        setattr(part, FUSED, False)
    stepped: list[torch.optim.Optimizer] = getattr(optimizer, "optimizers", [])
    others = {type(each).__name__ for each in stepped if not isinstance(each, torch.optim.AdamW)}
    if others or len(stepped) > len(parts):
        raise Float8ConfigError(
            "fuse_optimizer_step is for AdamW that steps after backward, one for each part of the model, and "
            f"torchtitan created {len(stepped)} of {', '.join(sorted(others)) or 'AdamW'}; leave it out"
        )
    steps = [fuse_step(each) for each in stepped]
    module: Any = importlib.import_module(_TRAINERS_CLIPPING)

    def leave_to_steps(
        parameters: Any, max_norm: float, total_norm: torch.Tensor, *_: Any, **__: Any
    ) -> None:
        for step in steps:
            step.clip_by(total_norm, max_norm)

    module.clip_grad_norm_ = _clipping(module.clip_grad_norm_, steps[0].total_norm, leave_to_steps)


def _clipping(
    clip: Callable[..., Any], norm_of: Callable[..., torch.Tensor], instead: Callable[..., None]
) -> Callable[..., Any]:
    """Return torchtitan's clipping with ``instead`` for the function of torch's that multiplies gradients.

    And with ``norm_of`` for torch's norm.
    """

    @functools.wraps(clip)
    def clipped(*args: Any, **kwargs: Any) -> Any:
        utils: Any = torch.nn.utils
        before = utils.get_total_norm, utils.clip_grads_with_norm_
        utils.get_total_norm, utils.clip_grads_with_norm_ = norm_of, instead
        try:
            return clip(*args, **kwargs)
        finally:
            utils.get_total_norm, utils.clip_grads_with_norm_ = before

    return clipped
