"""torchtitan 0.3's MinimalAsyncEP on a CPU: ranks are threads, and its own kernels are interpreted.

Peers' memory is that of one process, so that its tables of addresses hold. Exchanges are its own, but for the barrier.
"""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

_registered: list[str] = []


class _OfThread:
    """What each thread has an own one of: attributes are those of the thread's."""

    def __init__(self) -> None:
        object.__setattr__(self, "here", threading.local())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.here.state, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.here.state, name, value)


def on_threads(
    world: int, width: int, tokens: int, experts: int, top_k: int, body: Callable[[int, Any], Any]
) -> Any:
    """What ``body(rank, mesh)`` returns on each rank, of whose experts each has ``experts`` in all."""
    from torchtitan.distributed.minimal_async_ep import api

    _run_on_cpus(api)
    rows = world * tokens * min(top_k, experts // world)
    barrier = threading.Barrier(world, timeout=60)
    handle = SimpleNamespace(barrier=lambda channel: barrier.wait())
    hidden = [
        [torch.full((rows, width), torch.nan, dtype=torch.bfloat16) for _ in range(world)] for _ in range(2)
    ]
    counts = [torch.zeros(world, experts, dtype=torch.int64) for _ in range(world)]
    api._buffer_state = everyone = _OfThread()

    def addresses(buffers: list[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([buffer.data_ptr() for buffer in buffers])

    def run(rank: int) -> Any:
        group = SimpleNamespace(size=lambda: world, rank=lambda: rank)
        everyone.here.state = api._MinimalAsyncEPBufferState(
            group=group,
            num_max_tokens_per_rank=tokens,
            hidden_recv_buffers=[each[rank] for each in hidden],
            hidden_recv_handles=[handle, handle],
            hidden_recv_peer_buffers=hidden,
            hidden_recv_peer_ptrs=[addresses(each) for each in hidden],
            counts_recv_buffer=counts[rank],
            counts_recv_handle=handle,
            counts_recv_peer_buffers=counts,
            counts_recv_peer_ptrs=addresses(counts),
        )
        try:
            return body(rank, SimpleNamespace(size=lambda: world, get_group=lambda: group))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


def _run_on_cpus(api: Any) -> None:
    """Have torchtitan's operators run on CPUs, one kernel at a time: the interpreter has one state."""
    if _registered:
        return
    _registered.append(api.__name__)
    lock = threading.RLock()
    for name in ("dispatch", "combine", "dispatch_backward", "combine_backward"):
        operator = getattr(api, f"{name}_op")
        operator.register_kernel("cpu", operator._init_fn)
    from torchtitan.distributed.minimal_async_ep import kernels

    from f8sub.kernels.triton.launch import Launch

    def alone(launch: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(launch)
        def run(*args: Any, **kwargs: Any) -> Any:
            with lock:
                return launch(*args, **kwargs)

        return run

    for name in [name for name in vars(kernels) if name.endswith("_kernel") and not name.startswith("_")]:
        setattr(kernels, name, alone(getattr(kernels, name)))
        setattr(api, name, getattr(kernels, name))
    # f8sub's kernels are interpreted here, too.
    Launch.run = alone(Launch.run)
