"""A driver of Triton's for an H200 that is not there: what is launched is compiled and not run.

For what the host does before a kernel starts. ``install()`` comes before anything is launched in the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

TARGET = GPUTarget("cuda", 90, 32)
SHARED = 232448
"""Bytes that a program may have. Source: CUDA C++ Programming Guide, compute capability 9.0."""


class Utils:
    """What Triton asks of the device and has loaded there."""

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills and the most threads of a program."""
        return 0, 0, 0, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        """Of an H200, as far as Triton looks."""
        return {"max_shared_mem": SHARED, "multiprocessor_count": 132, "warpSize": 32}


class Driver:
    """Triton's driver. ``seen`` gets what a launch would have handed to CUDA: its kernel's name and all arguments."""

    utils = Utils()

    def __init__(self, seen: Callable[[str, tuple[Any, ...]], None]) -> None:
        self.seen = seen

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """The launcher of one compiled kernel."""
        del source
        return lambda *arguments: self.seen(metadata.hash, arguments)

    def get_current_device(self) -> int:
        """The first."""
        return 0

    def get_current_stream(self, _: int) -> int:
        """The default one."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Hopper."""
        return TARGET

    def get_active_torch_device(self) -> torch.device:
        """The tensors' own."""
        return torch.device("cpu")


def install(seen: Callable[[str, tuple[Any, ...]], None] = lambda *_: None) -> None:
    """Have Triton launch by such a driver from now on."""
    triton.runtime.driver.set_active(Driver(seen))
