"""Small tensors between host and device, which the host does not wait for."""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from f8sub.torch_compat import dispatch_stack_size, no_dispatch_modes


def sent_to(device: torch.device, values: Sequence[bool] | Sequence[int] | torch.Tensor) -> torch.Tensor:
    """The values on ``device``, bool or int64 if they are no tensor. A tensor of values is on the CPU."""
    if not isinstance(values, torch.Tensor):
        dtype = torch.bool if all(isinstance(value, bool) for value in values) else torch.int64
        values = torch.tensor(values, dtype=dtype, device="cpu")
    if device.type != "cuda":
        return values.to(device)
    if torch.cuda.is_current_stream_capturing():
        # Replays would read host memory that others use by then.
        raise RuntimeError(
            "a CUDA graph is captured with values that no launched step has sent to the device"
        )
    # The host waits for a copy from memory that is not pinned.
    return values.pin_memory().to(device, non_blocking=True)


def constant(device: torch.device, values: Sequence[bool] | Sequence[int]) -> torch.Tensor:
    """``sent_to``, once: the same tensor for the same values, so nobody may write to it."""
    if dispatch_stack_size():  # under FakeTensorMode it is fake
        return sent_to(device, values)
    return _constant(device, tuple(values), all(isinstance(value, bool) for value in values))


@functools.lru_cache(maxsize=256)
def _constant(device: torch.device, values: tuple[int, ...], is_bool: bool) -> torch.Tensor:
    with torch.inference_mode(mode=False):
        return sent_to(device, values)


class HostCopy:
    """A small tensor on its way to the host; one without memory (on meta, under FakeTensorMode) reads as zeros.

    Args:
        found: the tensor.
        place: for what a CUDA graph copies in each replay: memory on the host, pinned if there is a GPU.
    """

    def __init__(self, found: torch.Tensor, place: torch.Tensor | None = None) -> None:
        self._found = found
        self._event: torch.cuda.Event | None = None
        if place is not None:
            self._found = place.copy_(found, non_blocking=True)
            if found.is_cuda:
                # Recorded by each replay; an internal event of the graph could not be waited for.
                self._event = torch.cuda.Event(external=True)
                self._event.record()
        elif type(found) is not torch.Tensor or found.is_meta:
            with no_dispatch_modes():
                self._found = torch.zeros(found.shape, dtype=found.dtype, device="cpu")
        elif found.is_cuda:
            self._event = torch.cuda.Event()
            self._found = torch.empty(found.shape, dtype=found.dtype, device="cpu", pin_memory=True)
            self._found.copy_(found, non_blocking=True)
            self._event.record()

    @property
    def there(self) -> bool:
        """True if reading it waits for nothing."""
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
