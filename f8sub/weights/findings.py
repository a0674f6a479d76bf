"""What a reduction met that is worth telling, read from the device without waiting for it."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from f8sub.errors import Float8NumericsError, Float8Warning
from f8sub.torch_compat import no_dispatch_modes
from f8sub.weights.shard import Shard

if TYPE_CHECKING:
    from f8sub.weights.exchange import Region


def sent_to(device: torch.device, values: Sequence[bool] | Sequence[int]) -> torch.Tensor:
    """A tensor of the values on ``device``, which the host does not wait for."""
    dtype = torch.bool if all(isinstance(value, bool) for value in values) else torch.int64
    there = torch.tensor(values, dtype=dtype, device="cpu")
    return there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there.to(device)


class HostCopy:
    """A small tensor on its way to the host, which nothing waits for before it is read.

    A tensor without memory (on meta, under FakeTensorMode) reads as zeros.
    """

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
        """The values, on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._found

    def item(self) -> Any:
        """The value of its one element."""
        with no_dispatch_modes():
            return self.read().item()


class Findings:
    """Of one reduction of an exchange.

    Args:
        amax: the table's amaxes of weights, and as the last entry the lane of one that changed on some ranks.
        shards: the weights.
        told: regions, each with what its ``read`` returned.
    """

    def __init__(
        self, amax: torch.Tensor, shards: Sequence[Shard], told: Sequence[tuple["Region", torch.Tensor]]
    ) -> None:
        self._copy = HostCopy(torch.cat([amax[:-1].isinf(), amax[-1:], *(found for _, found in told)]))
        self._sizes = [len(amax) - 1, 1, *(len(found) for _, found in told)]
        self._shards, self._regions = shards, [region for region, _ in told]

    def tell(self) -> None:
        """Warn and raise as needed, on every rank alike.

        Raises:
            Float8NumericsError: NaN or infinity in a weight, or what a region tells of; names the layers.
        """
        found = self._copy.read()
        if not found.any():
            return
        weights, lane, *of_regions = found.split(self._sizes)
        if (alone := int(lane)) > 0:
            warnings.warn(
                f"{self._shards[alone - 1].fqn}: its weight changed on some ranks and not on others since scales "
                "were computed; the ranks gathered it with the scales from before the change, and what those could "
                "not hold as NaN, or as the largest code of a format without NaN. Change a sharded weight on every "
                "rank alike, then call precompute_scales(model)",
                Float8Warning,
                stacklevel=5,
            )
        bad = [s.fqn for s in self._shards if weights[s.amax.storage_offset() :][: s.amax.numel()].any()]
        messages = [bad_weights(bad, "on this or another rank")] if bad else []
        for region, of_region in zip(self._regions, of_regions, strict=True):
            messages += region.tell(of_region) if of_region.any() else []
        if messages:
            raise Float8NumericsError(". ".join(messages))


def bad_weights(fqns: Sequence[str], where: str) -> str:
    """The error that NaN or infinity in the weights of these layers is."""
    return (
        f"NaN or infinity in the master weight of {', '.join(fqns)} ({where}) when scales were last computed; its "
        "float8 codes have been NaN since. Restore the weights from a checkpoint, and look at the gradients of the "
        "optimizer step before: gradient norm, learning rate, loss scale"
    )
