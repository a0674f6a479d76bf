"""A policy of f8sub's in the place of torchtitan's, in blocks that torchtitan checkpoints; of any version of it."""

import functools
from typing import Any

import torch

from f8sub.errors import Float8ConfigError
from f8sub.linear.checkpointing import checkpoint_policy
from f8sub.torch_compat import is_checkpointed

KEEP = "float8_checkpoint_policy"
"""Attribute of a converted model: what its policy keeps. Copies for pipelines have it, too."""


def set_policy(model: torch.nn.Module, args: Any) -> None:
    """Forward pre-hook that gives checkpointed blocks their policy, when the model is first called.

    torchtitan wraps blocks after the model was converted, and tells nobody. Code is compiled in the first call.

    Raises:
        Float8ConfigError: no block is checkpointed.
    """
    if torch.compiler.is_compiling():
        return
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is set_policy:
            del model._forward_pre_hooks[key]
    keep = getattr(model, KEEP)
    blocks: list[Any] = [module for module in model.modules() if is_checkpointed(module)]
    if not blocks:
        raise Float8ConfigError(
            f"checkpoint_policy={keep!r} is for blocks that activation checkpointing wraps, and there is none: ask "
            "torchtitan for selective checkpointing, or leave the option out"
        )
    for block in blocks:
        block.checkpoint_fn = functools.partial(block.checkpoint_fn, context_fn=checkpoint_policy(keep))
