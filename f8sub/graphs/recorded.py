"""Records and replays a CUDA graph by torch's own calls."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def records(device: torch.device) -> bool:
    """Return whether there are graphs on a device."""
    return device.type == "cuda"


class Recorded:
    """Records and replays one CUDA graph.

    Args:
        stream: on which it is captured; launched steps run there before, so that autograd's streams are the same.
        pool: of memory, shared with other graphs that never run at the same time.
    """

    def __init__(self, stream: torch.cuda.Stream, pool: Any) -> None:
        self._graph, self._stream, self._pool = torch.cuda.CUDAGraph(), stream, pool

    def capture(self, run: Callable[[], Any]) -> Any:
        """Record what ``run`` launches, and run nothing of it; what it returns lies in the graph's memory."""
        before = torch.cuda.current_stream(self._stream.device)
        # NCCL's watchdog queries events meanwhile, in a thread of its own.
        mode = "thread_local"
        try:
            with torch.cuda.graph(self._graph, self._pool, self._stream, capture_error_mode=mode):
                return run()
        finally:
            torch.cuda.set_stream(before)  # which torch leaves out where a capture fails

    def replay(self) -> None:
        """Run it on the current stream."""
        self._graph.replay()


def memory_of(device: torch.device) -> tuple[int, int, int]:
    """Return bytes on ``device``: free, reserved by torch's allocator, and of those the ones in use."""
    if device.type != "cuda":
        return 0, 0, 0
    in_use = torch.cuda.memory_stats(device).get("active_bytes.all.current", 0)
    return torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device), in_use


class GraphMemory:
    """Counts the memory of captured steps. A launched step cannot use it, and needs as much of its own.

    Args:
        device: where the graphs are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reserved = self._in_use = self._largest = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what a capture in this block reserves."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        _, reserved, in_use = memory_of(self._device)
        yield
        _, reserved_then, in_use_then = memory_of(self._device)
        self._reserved += reserved_then - reserved
        self._in_use += in_use_then - in_use
        self._largest = max(self._largest, reserved_then - reserved)

    def freed(self) -> None:
        """Count anew: the graphs are gone."""
        self._reserved = self._in_use = self._largest = 0
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def too_little(self) -> str | None:
        """Return why a launched step would run out of memory beside the graphs; None where it would not."""
        free, reserved, in_use = memory_of(self._device)
        # What the allocator has cached for others than the graphs.
        left = free + (reserved - self._reserved) - (in_use - self._in_use)
        if left >= self._largest:
            return None
        needed, there = (f"{size / 2**30:.1f} GiB" for size in (self._largest, left))
        return (
            f"the graph was freed, because a launched step needs {needed} more and {there} are left beside it"
        )
