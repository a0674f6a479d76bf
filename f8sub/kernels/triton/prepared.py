"""Launches over tensors of one kind, kept from the second call on: a call then makes room for results, and launches.

Which kernels run over a matrix follows from its shape, dtype and formats. Working that out keeps the host longer than
the launches do (scripts/bench/launches.py).
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from f8sub.kernels.triton.launch import MOST, Launch
from f8sub.kernels.triton.support import ALIGNMENT
from f8sub.kernels.triton.triton_compat import driver


class Made(NamedTuple):
    """What is launched, and the tensors that are made for it.

    Attributes:
        launches: in order.
        results: what they fill, also what one of them fills for the next.
        scratch: flat tensors that are zero before the first launch.
    """

    launches: Sequence[Launch]
    results: Sequence[torch.Tensor]
    scratch: Sequence[torch.Tensor]


class _Argument(NamedTuple):
    """A tensor among a launch's arguments: which of a call's, and from where on; a descriptor without its tensor."""

    place: int
    number: int
    offset: int
    descriptor: Any


class _Prepared:
    """Compiled kernels, and which of a call's tensors is which of their arguments."""

    def __init__(self, made: Made, runners: list[tuple[Any, list[Any], list[_Argument]]]) -> None:
        self.device = made.results[0].device
        self.index = self.device.index or 0
        self.results = [(t.shape, t.stride(), t.dtype) for t in made.results]
        self.scratch = [(t.shape, t.dtype) for t in made.scratch]
        self.runners = runners

    @classmethod
    def of(cls, made: Made, given: Sequence[torch.Tensor | None]) -> "_Prepared | None":
        """None where a launch reads what ``make`` worked out of ``given``, such as a copy."""
        tensors = [*given, *made.results, *made.scratch]
        runners = []
        for launch in made.launches:
            values: list[Any] = [launch.arguments[name] for name in launch.kernel.arg_names]
            arguments = []
            for place, value in enumerate(values):
                descriptor = value if hasattr(value, "block_shape") else None
                tensor = value if descriptor is None else value.base
                if isinstance(tensor, torch.Tensor):
                    found = _found(tensor, tensors)
                    if found is None or (descriptor is not None and found[1:] != (0, tensor.dtype)):
                        return None
                    kept = None if descriptor is None else _of_another(descriptor, None)
                    arguments.append(_Argument(place, *found[:2], kept))
                    values[place] = None
            if launch.compiled is None:
                raise RuntimeError(f"{launch.kernel} was not compiled")
            runners.append((launch.compiled[launch.programs, 1, 1], values, arguments))
        return cls(made, runners)

    def run(self, given: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        device = self.device
        results = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for shape, stride, dtype in self.results
        ]
        scratch = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in self.scratch]
        tensors = [*given, *results, *scratch]
        stream = driver.active.get_current_stream(self.index)
        for runner, values, arguments in self.runners:
            handed = values.copy()
            for place, number, offset, descriptor in arguments:
                tensor: Any = tensors[number]
                if descriptor is not None:
                    tensor = _of_another(descriptor, tensor)
                elif offset:
                    tensor = tensor[offset:]
                handed[place] = tensor
            runner(*handed, stream=stream)
        return results


_known: dict[Hashable, _Prepared | None] = {}
"""By kind, from the second call on; None where launches read copies, and so are worked out each time."""

_once: set[int] = set()
"""Hashes of kinds that came once: tokens of experts may come in another number each time, and are not worth more."""


def run(
    kind: Hashable, given: Sequence[torch.Tensor | None], make: Callable[[], Made]
) -> Sequence[torch.Tensor]:
    """The results of ``make``'s launches, on the current device, which is to be that of the tensors.

    Args:
        kind: all that the launches follow from, besides the dtypes, shapes, strides and alignment of ``given``.
        given: what the launches read, None where an operand is left out.
        make: works out the launches, where this kind was not seen before. Their arguments are ``given``, results,
            scratch memory, and parts of flat ones.
    """
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in given]
    key = kind, *map(_kind, given, addresses), *map(addresses.index, addresses)
    found = _known.get(key, key)  # None is an entry, too
    if isinstance(found, _Prepared):
        return found.run(given)
    made = make()
    for launch in made.launches:
        launch.run()
    if found is None:
        return made.results
    if (seen := hash(key)) not in _once:
        if len(_once) >= MOST:
            _once.clear()
        _once.add(seen)
    # The interpreter compiles nothing.
    elif all(launch.compiled is not None for launch in made.launches):
        if len(_known) >= MOST:
            _known.clear()
        _known[key] = _Prepared.of(made, given)
    return made.results


def _kind(tensor: torch.Tensor | None, address: int | None) -> Hashable:
    if tensor is None or address is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, address % ALIGNMENT, tensor.get_device()


def _of_another(descriptor: Any, tensor: torch.Tensor | None) -> Any:
    """A descriptor of a tensor that lies as its own does, which its class would check at each launch."""
    made = object.__new__(type(descriptor))
    made.__dict__.update(descriptor.__dict__)
    made.base = tensor
    return made


def _found(
    value: torch.Tensor, tensors: Sequence[torch.Tensor | None]
) -> tuple[int, int, torch.dtype] | None:
    """Which tensor an argument lies in: its number, at which element it begins, and its dtype. None of others."""
    address = value.data_ptr()
    there = [(number, tensor) for number, tensor in enumerate(tensors) if tensor is not None]
    for number, tensor in there:
        if tensor.data_ptr() == address:
            return number, 0, tensor.dtype
    for number, tensor in there:
        offset = address - tensor.data_ptr()
        if tensor.dim() == 1 and 0 <= offset < tensor.nbytes:
            return number, offset // tensor.element_size(), tensor.dtype
    return None
