"""Small tensors between host and device, which the host does not wait for."""

from collections.abc import Sequence
from typing import Any

import torch

from f8sub.torch_compat import no_dispatch_modes


def sent_to(device: torch.device, values: Sequence[bool] | Sequence[int] | torch.Tensor) -> torch.Tensor:
    """The values on ``device``, bool or int64 if they are no tensor. A tensor of values is on the CPU."""
    if not isinstance(values, torch.Tensor):
        dtype = torch.bool if all(isinstance(value, bool) for value in values) else torch.int64
        values = torch.tensor(values, dtype=dtype, device="cpu")
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


class HostCopy:
    """A small tensor on its way to the host; one without memory (on meta, under FakeTensorMode) reads as zeros."""

    def __init__(self, found: torch.Tensor) -> None:
        self._found = found
        self._event: torch.cuda.Event | None = None
        if type(found) is not torch.Tensor or found.is_meta:
            with no_dispatch_modes():
                self._found = torch.zeros(found.shape, dtype=found.dtype, device="cpu")
        elif found.is_cuda:
            self._event = torch.cuda.Event()
            self._found = torch.empty(found.shape, dtype=found.dtype, device="cpu", pin_memory=True)
            self._found.copy_(found, non_blocking=True)
            self._event.record()

    @property
    def there(self) -> bool:
        """Whether reading it waits for nothing."""
        return self._event is None or self._event.query()

    def read(self) -> torch.Tensor:
        """The values, on the host; waits for them."""
        if self._event is not None:
            self._event.synchronize()
        return self._found

    def item(self) -> Any:
        """The value of its one element."""
        with no_dispatch_modes():
            return self.read().item()
