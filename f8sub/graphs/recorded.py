"""Records and replays a CUDA graph by torch's own calls."""

from collections.abc import Callable
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
