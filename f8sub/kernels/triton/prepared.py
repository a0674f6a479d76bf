"""Launches that were worked out before, over tensors of one kind: what runs at each call of a training step.

Which kernels run over a matrix follows from its shape, dtype and formats. Working that out keeps the host longer than
the launches do, so launches over tensors of one kind are prepared when they come for the second time. From then on a
call looks its kind up, allocates results, and launches.

No kernel is imported here: an operator that looks for prepared launches runs where triton is not installed.
"""

import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from f8sub.kernels.triton.support import ALIGNMENT
from f8sub.torch_compat import empty_strided, in_same_memory

MOST = 4096
"""Kinds that are prepared; then all of them are forgotten."""


class Argument(NamedTuple):
    """A tensor among a launch's arguments: which of a call's, from which byte on; a descriptor without its tensor."""

    number: int
    offset: int
    descriptor: Any

    @property
    def is_address(self) -> bool:
        """True where the launch is handed the tensor's own address."""
        return self.offset == 0 and self.descriptor is None


class Driver(NamedTuple):
    """Asks the driver of a GPU: which device is the current one, and what its current stream is."""

    current_device: Callable[[], int]
    current_stream: Callable[[int], Any]


class PreparedLaunches:
    """Holds compiled kernels, and which of a call's tensors is which of their arguments.

    A call puts into one list all that its launches are handed, and each launch picks its arguments from there: the
    addresses of the given tensors, the results and scratch memory; what follows from those; and constants.

    Args:
        device: that of all tensors.
        given: how many tensors a call is given.
        results: what the launches fill, each call anew.
        scratch: flat tensors that are zero before the first launch.
        launches: each takes a stream and its arguments. Arguments that are tensors are each an ``Argument`` here.
        driver: of the GPU.
    """

    def __init__(
        self,
        device: torch.device,
        given: int,
        results: Sequence[torch.Tensor],
        scratch: Sequence[torch.Tensor],
        launches: Sequence[tuple[Callable[[Any, Sequence[Any]], None], Sequence[Any]]],
        driver: Driver,
    ) -> None:
        self.device, self.index = device, device.index or 0
        # Tuples: torch.Size is none to what allocates.
        self.results = [(tuple(t.shape), t.stride(), t.dtype) for t in results]
        self.scratch = [(t.shape, t.dtype) for t in scratch]
        self.current_device = driver.current_device
        self.current_stream = driver.current_stream
        self.empty = empty_strided(self.device)
        values = [value for _, arguments in launches for value in arguments]
        self.derived = [value for value in values if type(value) is Argument and not value.is_address]
        self.constants = [value for value in values if type(value) is not Argument]
        first = given + len(results) + len(scratch)
        of_derived, of_constants = itertools.count(first), itertools.count(first + len(self.derived))

        def place(value: Any) -> int:
            if type(value) is not Argument:
                return next(of_constants)
            return value.number if value.is_address else next(of_derived)

        self.runners = [
            (launch, operator.itemgetter(*map(place, arguments))) for launch, arguments in launches
        ]

    def run(self, given: Sequence[torch.Tensor | None], addresses: Sequence[int]) -> list[torch.Tensor]:
        """Fill new results; the current device is that of the tensors."""
        empty = self.empty
        results = [empty(*each) for each in self.results]
        # Numbers, not tensors: of each tensor Triton asks the driver whether a GPU may read it.
        handed: list[Any] = [*addresses, *[tensor.data_ptr() for tensor in results]]
        scratch: list[torch.Tensor] = []
        if self.scratch:
            scratch = [torch.zeros(shape, dtype=dtype, device=self.device) for shape, dtype in self.scratch]
            handed += [tensor.data_ptr() for tensor in scratch]
        if self.derived:
            tensors = [*given, *results, *scratch]
            handed += [
                handed[number] + offset if descriptor is None else of_another(descriptor, tensors[number])
                for number, offset, descriptor in self.derived
            ]
        handed += self.constants
        stream = self.current_stream(self.index)
        for launch, arguments in self.runners:
            launch(stream, arguments(handed))
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

    Elsewhere is where the tensors' GPU is not the current device, and where they are traced or of a subclass.
    """
    if type(given[0]) is not torch.Tensor or torch.compiler.is_compiling():
        return None
    key, addresses = key_of(kind, given)
    found = cache.get(key)
    # A launch goes to the current device, wherever the tensors are.
    if found is None or found.current_device() != found.index:
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
        # One argument stands for a tensor that is given twice.
        twin = addresses.index(address) if address in addresses else -1
        key += (
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            address % ALIGNMENT,
            tensor.get_device(),
            twin,
        )
        addresses.append(address)
    return tuple(key), addresses


class Asked(NamedTuple):
    """What a call of an operator asks for.

    Attributes:
        kind: of its launches.
        given: what they read: the operator's first two tensors, or views of them that begin where they do.
        flat: which results ``flatten`` takes.
    """

    kind: Hashable
    given: Sequence[torch.Tensor | None]
    flat: Sequence[int]


def at_one_place(
    function: Callable[..., Sequence[torch.Tensor]], asked: Callable[..., Asked]
) -> Callable[..., Sequence[torch.Tensor]]:
    """Return ``function`` for one call in compiled code, which gives it tensors of the same shapes and strides.

    So nothing is looked up once its launches are prepared; the device of the tensors is the current one there. Each
    result lies as compiled code expects: adjacent, and from a multiple of ``ALIGNMENT`` on.

    Args:
        function: of an operator whose first two arguments are all that its launches read; the second may be None.
        asked: takes the operator's arguments.
    """
    # One object, which threads that share the code see whole.
    known: tuple[PreparedLaunches, tuple[int, int], tuple[int, ...]] | None = None

    def call(first: torch.Tensor, second: torch.Tensor | None, *rest: Any) -> Sequence[torch.Tensor]:
        nonlocal known
        addresses = first.data_ptr(), 0 if second is None else second.data_ptr()
        alignments = addresses[0] % ALIGNMENT, addresses[1] % ALIGNMENT
        are_apart = addresses[0] != addresses[1]
        # Kernels are compiled for alignments, and one argument of theirs stands for a tensor that is given twice.
        if (kept := known) is not None and are_apart and alignments == kept[1]:
            results = kept[0].run((first, second), addresses)
            return flatten(results, kept[2]) if kept[2] else results
        made = function(first, second, *rest)
        # Prepared when they come for the second time, here or at another place.
        kind, given, flat = asked(first, second, *rest)
        key, read = key_of(kind, given)
        found = cache.get(key)
        if found is not None and are_apart and tuple(read) == addresses:
            known = found, alignments, tuple(flat)
        return [each if _is_laid_out(each) else each.contiguous().clone() for each in made]

    return call


def _is_laid_out(result: torch.Tensor) -> bool:
    return result.is_contiguous() and result.data_ptr() % ALIGNMENT == 0


def without_class(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as one of torch's own class, in the same memory.

    Weights come to an operator's function as they are: it is called past the dispatcher.
    """
    if type(tensor) is torch.Tensor:
        return tensor
    return in_same_memory(tensor, tuple(tensor.shape), tensor.stride())


def flatten(results: list[torch.Tensor], which: Sequence[int]) -> list[torch.Tensor]:
    """Give some results one dimension, in which their elements lie as they do in memory."""
    for index in which:
        results[index] = in_same_memory(results[index], (results[index].numel(),), (1,))
    return results


def of_another(descriptor: Any, tensor: torch.Tensor | None) -> Any:
    """Return a descriptor of a tensor that lies as its own does, without its class's checks at each launch."""
    made = object.__new__(type(descriptor))
    made.__dict__.update(descriptor.__dict__)
    made.base = tensor
    return made
