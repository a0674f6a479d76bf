"""Capture: what the host has to do at each replay of a CUDA graph, in which no Python of the step runs.

``f8sub.graph_step`` makes one while it captures a step. Code that keeps something on the host enters it here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from f8sub.host_copy import HostCopy

_SPARE = 1 << 20
"""Bytes of pinned memory for what nobody announced."""


class Capture:
    """One captured graph, as the host sees it.

    What the captured Python changed on the host stands for the first replay. From the second one on the calls that were
    entered run instead. A capture that fails never runs on the device, so what it changed is undone.

    Args:
        device: where the graph runs.
        size: bytes of pinned memory for copies to the host. A graph writes to the same memory in each replay.
    """

    def __init__(self, device: torch.device, size: int = 0) -> None:
        # Pinned, so that a replay copies to it while the host goes on.
        self._pinned = torch.empty(
            size + _SPARE, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda"
        )
        self._used = 0
        self._before: list[Callable[[], None]] = []
        self._after: list[Callable[[], None]] = []
        self._undo: list[Callable[[], None]] = []
        self._conditions: list[Callable[[], str | None]] = []
        self._kept: list[Any] = []

    def before_replay(self, call: Callable[[], None]) -> None:
        """Have ``call`` run before each replay but the first; it may raise an error, and nothing is replayed then."""
        self._before.append(call)

    def after_replay(self, call: Callable[[], None]) -> None:
        """Have ``call`` run after each replay was launched, but the first."""
        self._after.append(call)

    def launch_if(self, reason: Callable[[], str | None]) -> None:
        """Have the next step launched, and not replayed, where ``reason`` has one."""
        self._conditions.append(reason)

    def if_it_fails(self, call: Callable[[], None]) -> None:
        """Have ``call`` undo what the captured Python changed on the host."""
        self._undo.append(call)

    def keep(self, *objects: Any) -> None:
        """Keep alive what replays read or write."""
        self._kept += objects

    def copied(self, found: torch.Tensor) -> HostCopy:
        """A copy of ``found`` on the host that each replay makes anew, and that can be read before the replay ends."""
        size = found.numel() * found.itemsize
        if self._used + size > len(self._pinned):
            raise RuntimeError(f"a capture copies {size} bytes more to the host than it was announced")
        place = self._pinned[self._used : self._used + size].view(found.dtype).view(found.shape)
        # From a multiple of 16 bytes on memory can be viewed as any dtype.
        self._used += size + -size % 16
        return HostCopy(found, place)

    def why_launched(self) -> str | None:
        """Why the next step is to be launched; None where it may be a replay."""
        return next((reason for condition in self._conditions if (reason := condition()) is not None), None)

    def prepare(self) -> None:
        """Do what comes before a replay."""
        for call in self._before:
            call()

    def replayed(self) -> None:
        """Do what comes after a replay."""
        for call in self._after:
            call()

    def failed(self) -> None:
        """Undo the last change first."""
        for call in reversed(self._undo):
            call()


_current: list[Capture] = []


@contextmanager
def entered(capture: Capture) -> Iterator[None]:
    """While ``capture`` is made; on every thread, because backward runs on threads of its own."""
    _current.append(capture)
    try:
        yield
    finally:
        _current.remove(capture)


def current_capture() -> Capture | None:
    """The capture that ``graph_step`` makes now, if it makes one."""
    return _current[-1] if _current else None


def host_copy(found: torch.Tensor) -> HostCopy:
    """A small tensor on its way to the host, once or with each replay of the graph that is captured."""
    capture = current_capture()
    return HostCopy(found) if capture is None else capture.copied(found)


def is_capturing(tensor: torch.Tensor) -> bool:
    """Return whether what is done to ``tensor`` now is recorded in a CUDA graph, and done when that is replayed."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


_reasons: list[str] = []


@contextmanager
def launching(reason: str) -> Iterator[None]:
    """Have ``graph_step`` launch the steps inside, because hooks have to see them."""
    _reasons.append(reason)
    try:
        yield
    finally:
        # By value, because another thread may have entered a block since.
        _reasons.remove(reason)


def why_launched() -> str | None:
    """The reason of the innermost ``launching``, None outside of any."""
    return _reasons[-1] if _reasons else None
