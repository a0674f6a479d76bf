"""Activation checkpointing of the slice's blocks: torchtitan's policy, f8sub's, or all of a block again."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import f8sub

aten = torch.ops.aten

SAVED = {
    aten.mm.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    aten.max.default,
}
"""What torchtitan 0.2's selective mode saves; of ``aten.mm`` every second one is made again."""


def _torchtitans() -> Any:
    seen: Counter[str] = Counter()

    def decide(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        when = "backward" if ctx.is_recompute else "forward"
        seen[when] += func == aten.mm.default
        is_saved = func in SAVED and not (func == aten.mm.default and seen[when] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


MODES: dict[str, Any] = {
    "none": None,
    "selective": functools.partial(checkpoint_wrapper, context_fn=_torchtitans, preserve_rng_state=False),
    "gemms": functools.partial(
        checkpoint_wrapper, context_fn=f8sub.checkpoint_policy("gemms"), preserve_rng_state=False
    ),
    "full": functools.partial(checkpoint_wrapper, preserve_rng_state=False),
}
"""By name, what wraps a block; None for no checkpointing."""


def checkpointed(block: nn.Module, mode: str) -> nn.Module:
    wrap = MODES[mode]
    wrapped: nn.Module = block if wrap is None else wrap(block)
    return wrapped
