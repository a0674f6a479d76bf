"""Finds what a CUDA graph cannot hold of a step, while the step is launched."""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

_WAITS = re.compile("called a synchronizing CUDA operation")
_P2P = ("batch_isend_irecv", "isend", "irecv", "send", "recv")


@contextmanager
def noticed_waits(device: torch.device) -> Iterator[list[str]]:
    """Find where the host waits for the device: ``["model.py:31 waits for the GPU"]``, the first first.

    Torch's own check, ``torch.cuda.set_sync_debug_mode``, sees most of them. Other warnings are shown as ever.
    """
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        # Else a wait that a line was warned of before would be missed.
        warnings.simplefilter("always")
        mode = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else 0
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            with _noticed_sends(found):
                yield found
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode(mode)
    for warning in caught:
        if _WAITS.search(str(warning.message)):
            found.append(f"{warning.filename}:{warning.lineno} waits for the GPU")
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


@contextmanager
def _noticed_sends(found: list[str]) -> Iterator[None]:
    """Notice what pipeline schedules do: sends to one rank, whose order a schedule decides on the host."""
    own: dict[str, Callable[..., Any]] = {name: getattr(dist, name) for name in _P2P}

    def noticed(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.append(f"torch.distributed.{name} is called, as pipeline schedules do")
            return own[name](*args, **kwargs)

        return call

    for name in _P2P:
        # Schedules look these functions up in torch.distributed at each call.
        setattr(dist, name, noticed(name))
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(dist, name, function)
