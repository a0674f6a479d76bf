"""Counts what a process sends: every c10d collective with the bytes it fills, by name."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(_bytes(item) for item in value)
    return 0


class Wire(TorchDispatchMode):
    """``calls`` and ``output_bytes`` of each collective, such as ``_allgather_base_`` and ``allreduce_``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.output_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2]
            self.calls[name] += 1
            self.output_bytes[name] += _bytes(args[0])
        return func(*args, **(kwargs or {}))

    @property
    def gathered(self) -> int:
        """Bytes that all-gathers filled on this rank."""
        return sum(count for name, count in self.output_bytes.items() if "allgather" in name)

    @property
    def all_reduces(self) -> int:
        return sum(count for name, count in self.calls.items() if "allreduce" in name)
