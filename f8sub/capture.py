"""Capture: what the host has to do at each replay of a CUDA graph, in which no Python of the step runs.

``f8sub.graph_step`` makes one while it captures a step. Code that keeps something on the host enters it here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from f8sub.host_copy import HostCopy, sent_to

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


Place = tuple[torch.device, int]
"""A device and its current stream, on which a table is written before the first kernel that reads it."""

_in_graphs: dict[int, torch.Tensor] = {}
"""Tables that CUDA graphs read, by their addresses: kept for good, some kilobytes each."""


def place_of(tensor: torch.Tensor) -> Place:
    """Return where tables for kernels that write to ``tensor`` are to be."""
    return tensor.device, torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


@functools.lru_cache(maxsize=1024)
def table_on(place: Place, numbers: tuple[Any, ...]) -> torch.Tensor:
    """Return a table that kernels read, int64: the same tensor for the same numbers, so nobody may write to it."""
    return sent_to(place[0], numbers)


def programs_on(
    place: Place, numbers: tuple[Any, ...], programs: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a table of some things, and of each program the thing that it works on; int64 and int32.

    Args:
        place: where the tables are to be.
        numbers: as ``table_on`` takes them.
        programs: how many work on each thing.
    """
    things = torch.arange(len(programs), dtype=torch.int32, device="cpu")
    of_program = things.repeat_interleave(torch.tensor(programs, dtype=torch.int64, device="cpu"))
    return table_on(place, numbers), sent_to(place[0], of_program)


def addresses_on(like: torch.Tensor, numbers: tuple[int, ...]) -> torch.Tensor:
    """Return addresses as a kernel reads them, int64; in a CUDA graph they are written from a kernel's arguments.

    Gradients there have addresses that no step before had, and a copy from host memory would be replayed from there.
    """
    if not is_capturing(like):
        return table_on(place_of(like), numbers)
    table = torch.zeros(len(numbers), dtype=torch.int64, device=like.device)
    torch._foreach_add_(list(table.unbind()), list(numbers))
    return table


def keep_for_replays(*tables: torch.Tensor) -> None:
    """Keep tables alive that the graph reads which is captured now: a cache may drop them, and a replay reads on."""
    if tables and is_capturing(tables[0]):
        _in_graphs.update((each.data_ptr(), each) for each in tables)


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
