"""Hooks by which the forwards of a converted model are seen, until nothing waits for one."""

from collections.abc import Callable
from typing import Any

import torch

from f8sub.weights.conversion import Conversion


def check_ranks_hook(conversion: Conversion, module: torch.nn.Module, args: Any) -> None:
    """Forward pre-hook of a converted model: the check across ranks before any weight is gathered, once."""
    if not torch.compiler.is_compiling():
        conversion.refresh()
        remove(check_ranks_hook, module)


def remove(function: Callable[..., None], module: torch.nn.Module) -> None:
    """Remove a hook from before or after a module's forward; its arguments may be bound by ``functools.partial``."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if getattr(hook, "func", hook) is function]:
            del hooks[key]
            module._forward_hooks_always_called.pop(key, None)
