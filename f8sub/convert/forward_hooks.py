"""Hooks by which the forwards of a converted model are seen, until nothing waits for one."""

from collections.abc import Callable
from typing import Any

import torch

from f8sub.weights.conversion import Conversion


def check_ranks_hook(conversion: Conversion, module: torch.nn.Module, args: Any) -> None:
    """Forward pre-hook of a converted model: the check across ranks before any weight is gathered, once."""
    if not torch.compiler.is_compiling():
        conversion.refresh()
        _remove(check_ranks_hook, module)


def guests_hook(conversion: Conversion, module: torch.nn.Module, args: Any) -> None:
    """Forward pre-hook of a converted model, until all guests saw what they wait for."""
    if not torch.compiler.is_compiling():
        waiting = [guest for guest in conversion.guests if not guest.forward()]
        if not waiting:
            _remove(guests_hook, module)


def _remove(function: Callable[..., None], module: torch.nn.Module) -> None:
    for key, hook in list(module._forward_pre_hooks.items()):
        if getattr(hook, "func", None) is function:
            del module._forward_pre_hooks[key]
