"""Launches over tensors of one kind, kept from the second call on: a call then makes room for results, and launches.

Which kernels run over a matrix follows from its shape, dtype and formats. Working that out keeps the host longer than
the launches do (scripts/bench/launches.py).
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from triton.runtime import driver

from f8sub.kernels.triton.launcher import MOST, Launch
from f8sub.kernels.triton.support import ALIGNMENT


class Made(NamedTuple):
    """What is launched, and the tensors that are made for it.

    Attributes:
        launches: in order.
        results: what they fill.
        scratch: flat tensors that are zero before the first launch.
    """

    launches: Sequence[Launch]
    results: Sequence[torch.Tensor]
    scratch: Sequence[torch.Tensor]


class _Prepared:
    """Compiled kernels, and which of a call's tensors is which of their arguments."""

    def __init__(self, made: Made, given: Sequence[torch.Tensor | None]) -> None:
        self.device = made.results[0].device
        self.index = self.device.index or 0
        self.results = [(t.shape, t.stride(), t.dtype) for t in made.results]
        self.scratch = [(t.shape, t.dtype) for t in made.scratch]
        tensors = [*given, *made.results, *made.scratch]
        self.runners = []
        for launch in made.launches:
            values: list[Any] = [launch.arguments[name] for name in launch.kernel.arg_names]
            places = []
            for place, value in enumerate(values):
                if isinstance(value, torch.Tensor):
                    places.append((place, *_found(value, tensors)))
                    values[place] = None
            if launch.compiled is None:
                raise RuntimeError(f"{launch.kernel} was not compiled")
            self.runners.append((launch.compiled[launch.programs, 1, 1], values, places))

    def run(self, given: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        device = self.device
        results = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for shape, stride, dtype in self.results
        ]
        scratch = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in self.scratch]
        tensors = [*given, *results, *scratch]
        stream = driver.active.get_current_stream(self.index)
        for runner, values, places in self.runners:
            arguments = values.copy()
            for place, number, offset in places:
                tensor = tensors[number]
                arguments[place] = tensor[offset:] if offset and tensor is not None else tensor
            runner(*arguments, stream=stream)
        return results


_known: dict[Hashable, _Prepared | None] = {}
"""By kind; None where it came once. Tokens of experts come in another number each time, and are not worth it."""


def run(
    kind: Hashable, given: Sequence[torch.Tensor | None], make: Callable[[], Made]
) -> Sequence[torch.Tensor]:
    """The results of ``make``'s launches, on the current device, which is to be that of the tensors.

    Args:
        kind: all that the launches follow from, besides the dtypes, shapes and alignment of ``given``.
        given: what the launches read, contiguous, None where an operand is left out.
        make: works out the launches, where this kind was not seen before. Their arguments are ``given``, results, and
            parts of scratch memory.
    """
    key = kind, *map(_kind, given)
    found = _known.get(key)
    if found is not None:
        return found.run(given)
    made = make()
    for launch in made.launches:
        launch.run()
    if key not in _known:
        if len(_known) >= MOST:
            _known.clear()
        _known[key] = None
    # The interpreter compiles nothing.
    elif all(launch.compiled is not None for launch in made.launches):
        _known[key] = _Prepared(made, given)
    return made.results


def _kind(tensor: torch.Tensor | None) -> Hashable:
    if tensor is None:
        return None
    return tensor.shape, tensor.dtype, tensor.data_ptr() % ALIGNMENT, tensor.get_device()


def _found(value: torch.Tensor, tensors: Sequence[torch.Tensor | None]) -> tuple[int, int]:
    """The number of the tensor that an argument lies in, and at which of its elements it begins."""
    address = value.data_ptr()
    for number, tensor in enumerate(tensors):
        if tensor is not None and 0 <= address - tensor.data_ptr() < tensor.nbytes:
            return number, (address - tensor.data_ptr()) // tensor.element_size()
    raise RuntimeError("an argument of a launch lies in none of the tensors that are given or made")
