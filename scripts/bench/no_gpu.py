"""A driver of Triton's for an H200 that is not there: what is launched is compiled and not run.

For what the host does before a kernel starts. ``install()`` comes before anything is launched in the process.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

PROPERTIES = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}
"""Of an H200, as far as Triton looks. Source: CUDA C++ Programming Guide, compute capability 9.0."""


def install(seen: Callable[[str, tuple[Any, ...]], None] = lambda *_: None) -> None:
    """Have Triton launch by such a driver from now on.

    ``seen`` gets what a launch would have handed to CUDA: its kernel's name and all arguments.
    """
    triton.runtime.driver.set_active(_Driver(seen))


class _Driver:
    utils = types.SimpleNamespace(
        load_binary=lambda *_: (0, 0, 0, 0, 1024),  # module, function, registers, spills, most threads
        get_device_properties=lambda _: PROPERTIES,
    )

    def __init__(self, seen: Callable[[str, tuple[Any, ...]], None]) -> None:
        self.seen = seen

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """The launcher of one compiled kernel."""
        return lambda *arguments: self.seen(metadata.hash, arguments)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")
