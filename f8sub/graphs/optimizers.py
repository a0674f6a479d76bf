"""Decides whether a CUDA graph can hold an optimizer's step, and puts learning rates where it reads them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_MISSING = object()


def why_not_captured(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why the optimizer's step cannot be captured; None where it may be tried.

    Torch's optimizers take learning rates and step counters from the device where they are fused or capturable.
    """
    for group in optimizer.param_groups:
        # Else its counters are numbers of the host, which a graph would hold as constants.
        if not (group.get("fused") or group.get("capturable")):
            return f"{type(optimizer).__name__} steps by the host; create it with fused=True or with capturable=True"
    return None


class Rates:
    """Keeps the learning rates of an optimizer's groups, float32, where a graph reads them.

    Users and schedulers go on to set ``group["lr"]`` to numbers. Rates that are tensors on the device stay as they are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._rates: list[torch.Tensor] = []
        self._values: list[float] = []

    def send(self) -> None:
        """Write the rates that changed to the device."""
        for index, group in enumerate(self._optimizer.param_groups):
            value = group["lr"]
            if index == len(self._rates):
                self._rates.append(torch.zeros((), dtype=torch.float32, device=self._device))
                # Equal to no rate, so that the first one is sent.
                self._values.append(float("nan"))
            if not is_on_device(value) and self._values[index] != float(value):
                self._values[index] = float(value)
                self._rates[index].fill_(self._values[index])

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the optimizer step with the rates on the device."""
        groups = self._optimizer.param_groups
        before = [(group["lr"], group.get("capturable", _MISSING)) for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            if not is_on_device(group["lr"]):
                group["lr"] = rate
            if "capturable" in group:
                # Also for fused ones: torch then allows the capture, and keeps the step counters on the device.
                group["capturable"] = True
        try:
            yield
        finally:
            # Schedulers and checkpoints are to find what the user set.
            for group, (rate, capturable) in zip(groups, before, strict=True):
                group["lr"] = rate
                if capturable is not _MISSING:
                    group["capturable"] = capturable


def is_on_device(rate: Any) -> bool:
    """Return whether a learning rate is a tensor that a graph reads as it is, which therefore must not be replaced."""
    return isinstance(rate, torch.Tensor) and rate.is_cuda
