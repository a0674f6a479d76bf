"""Launches that were worked out before, over tensors of one kind: what runs at each call of a training step.

Which kernels run over a matrix follows from its shape, dtype and formats. Working that out keeps the host longer than
the launches do, so launches over tensors of one kind are prepared when they come for the second time. From then on a
call looks its kind up, allocates results, and launches.

No kernel is imported here: an operator that looks for prepared launches runs where triton is not installed.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from f8sub.kernels.triton.support import ALIGNMENT
from f8sub.torch_compat import empty_strided

MOST = 4096
"""Kinds that are prepared; then all of them are forgotten."""


class Argument(NamedTuple):
    """A tensor among a launch's arguments: which of a call's, from which byte on; a descriptor without its tensor."""

    place: int
    number: int
    offset: int
    descriptor: Any


class Driver(NamedTuple):
    """Asks the driver of a GPU: which device is the current one, and what its current stream is."""

    current_device: Callable[[], int]
    current_stream: Callable[[int], Any]


class PreparedLaunches:
    """Holds compiled kernels, and which of a call's tensors is which of their arguments."""

    def __init__(
        self,
        results: Sequence[torch.Tensor],
        scratch: Sequence[torch.Tensor],
        runners: list[tuple[Any, list[Any], list[Argument]]],
        driver: Driver,
    ) -> None:
        self.device = results[0].device
        self.index = self.device.index or 0
        # Tuples: torch.Size is none to what allocates.
        self.results = [(tuple(t.shape), t.stride(), t.dtype) for t in results]
        self.scratch = [(t.shape, t.dtype) for t in scratch]
        self.runners = runners
        self.driver = driver
        self.empty = empty_strided(self.device)

    def run(self, given: Sequence[torch.Tensor | None], addresses: Sequence[int]) -> list[torch.Tensor]:
        """Fill new results; the current device is that of the tensors."""
        empty = self.empty
        results = [empty(*each) for each in self.results]
        # Numbers, not tensors: of each tensor Triton asks the driver whether a GPU may read it.
        pointers = [*addresses, *[tensor.data_ptr() for tensor in results]]
        scratch = [torch.zeros(shape, dtype=dtype, device=self.device) for shape, dtype in self.scratch]
        pointers += [tensor.data_ptr() for tensor in scratch]
        stream = self.driver.current_stream(self.index)
        for runner, values, arguments in self.runners:
            # Several threads may run it at once, such as autograd's.
            handed = values.copy()
            for place, number, offset, descriptor in arguments:
                if descriptor is None:
                    handed[place] = pointers[number] + offset
                else:
                    handed[place] = of_another(descriptor, [*given, *results, *scratch][number])
            runner(*handed, stream=stream)
        return results


cache: dict[Hashable, PreparedLaunches | None] = {}
"""By kind, from the second call on; None where launches read copies, and so are worked out each time."""


def keep(key: Hashable, launches: PreparedLaunches | None) -> None:
    """Prepare a kind, by the key that ``key_of`` gave."""
    # All at once: what is in use is there again after two calls.
    if len(cache) >= MOST:
        cache.clear()
    cache[key] = launches


def run(kind: Hashable, given: Sequence[torch.Tensor | None]) -> list[torch.Tensor] | None:
    """The results of the launches that ``launch.run`` prepared for a kind; None where it has not, or elsewhere.

    The tensors are on one GPU, plain, and not empty. Elsewhere is where that GPU is not the current device.
    """
    key, addresses = key_of(kind, given)
    found = cache.get(key)
    if found is None or found.driver.current_device() != found.index:
        return None
    return found.run(given, addresses)


def key_of(kind: Hashable, given: Sequence[torch.Tensor | None]) -> tuple[Hashable, list[int]]:
    """Whatever the launches of a call follow from, and the addresses of the tensors, 0 for None.

    Of the addresses only their alignment counts, and which of them are the same one.
    """
    key: list[Hashable] = [kind]
    addresses: list[int] = []
    for tensor in given:
        if tensor is None:
            key.append(None)
            addresses.append(0)
            continue
        address = tensor.data_ptr()
        key += tensor.shape, tensor.stride(), tensor.dtype, address % ALIGNMENT, tensor.get_device()
        # One argument stands for a tensor that is given twice.
        key.append(addresses.index(address) if address in addresses else -1)
        addresses.append(address)
    return tuple(key), addresses


def of_another(descriptor: Any, tensor: torch.Tensor | None) -> Any:
    """Return a descriptor of a tensor that lies as its own does, without its class's checks at each launch."""
    made = object.__new__(type(descriptor))
    made.__dict__.update(descriptor.__dict__)
    made.base = tensor
    return made
