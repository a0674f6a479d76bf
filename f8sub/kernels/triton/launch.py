"""Launches kernels as data, and keeps what a launch of one kind was compiled to and how its arguments follow.

Triton binds, types and hashes every argument at every launch, which is most of what a launch costs the host
(scripts/bench/launches.py). So what it compiled for arguments of some kind is kept here and launched by itself.

Which kernels run over a matrix follows from its shape, dtype and formats. Working that out keeps the host longer than
the launches do, so launches over tensors of one kind are kept from the second call on: a call then makes room for
results, and launches.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from f8sub.kernels.triton.support import ALIGNMENT
from f8sub.kernels.triton.triton_compat import INTERPRETED, PINNED, CompiledKernel, driver

MOST = 4096
"""Kernels that are kept; then all of them are forgotten, and Triton's own cache is asked again."""

_compiled: dict[Any, CompiledKernel] = {}
_constants: dict[Any, list[bool]] = {}
"""Of a kernel's function: which arguments are constants, by whose value Triton compiles."""


class Launch(NamedTuple):
    """One launch of a kernel.

    What is launched is data, so that the same launches can be run, interpreted, and compiled where there is no GPU.

    Attributes:
        kernel: the kernel.
        programs: how many.
        arguments: by name; tensors, descriptors, numbers, constants, and None for an operand that is left out. The
            kernel takes those that it has, each of one type always.
        options: what Triton is to compile it with, besides ``PINNED``.
    """

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    options: dict[str, int] = {"num_warps": 8}

    @property
    def taken(self) -> dict[str, Any]:
        """The arguments that the kernel takes."""
        return {name: self.arguments[name] for name in self.kernel.arg_names}

    @property
    def compile_options(self) -> dict[str, int]:
        """All that Triton is to compile it with."""
        return {**self.options, **PINNED}

    @property
    def compiled(self) -> CompiledKernel | None:
        """The compiled kernel that ``run`` launches, once it did; None where the interpreter runs the kernel."""
        return _compiled.get(self._key([self.arguments[name] for name in self.kernel.arg_names]))

    def _key(self, values: list[Any]) -> Any:
        # All that Triton may compile another kernel for. The function stands for the kernel, whose hash is that of its
        # source.
        function = self.kernel.fn
        constants = _constants.get(function)
        if constants is None:
            # The interpreter has no params; it compiles nothing either.
            parameters = () if INTERPRETED else self.kernel.params
            constants = _constants[function] = [parameter.is_constexpr for parameter in parameters]
        kinds = [
            value if constant else _kind(value) for value, constant in zip(values, constants, strict=False)
        ]
        return function, *self.options.items(), *kinds

    def run(self) -> None:
        """Launch it on the current device, which is to be that of the tensors."""
        values = [self.arguments[name] for name in self.kernel.arg_names]
        key = self._key(values)
        known = _compiled.get(key)
        if known is not None:
            # Triton's own look at the arguments is left out: the key says that they are of the same kind.
            known[self.programs, 1, 1](*values)
            return
        compiled = self.kernel[(self.programs,)](*values, **self.compile_options)
        # The interpreter compiles nothing.
        if isinstance(compiled, CompiledKernel):
            # All at once: what is in use is there again after one call.
            if len(_compiled) >= MOST:
                _compiled.clear()
            _compiled[key] = compiled


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % ALIGNMENT == 0, value.get_device()
    # Rows that each step has another number of are one kernel. Source: triton's native_specialize_impl.
    if type(value) is int:
        return 1 if value == 1 else (value % ALIGNMENT == 0, value.bit_length() > 31)
    if type(value) is float:
        return float
    # A descriptor; of its two classes Triton before 3.6 has one.
    if value is not None and not isinstance(value, (int, float)) and hasattr(value, "block_shape"):
        return type(value), value.base.dtype, value.base.get_device(), *value.block_shape
    return value


class Launches(NamedTuple):
    """Launches, and the tensors that they fill.

    Attributes:
        launches: in order.
        results: what they fill, also what one of them fills for the next.
        scratch: flat tensors that are zero before the first launch.
    """

    launches: Sequence[Launch]
    results: Sequence[torch.Tensor]
    scratch: Sequence[torch.Tensor]


class _Argument(NamedTuple):
    """A tensor among a launch's arguments: which of a call's, from which byte on; a descriptor without its tensor."""

    place: int
    number: int
    offset: int
    descriptor: Any


class _PreparedLaunches:
    """Holds compiled kernels, and which of a call's tensors is which of their arguments."""

    def __init__(self, made: Launches, runners: list[tuple[Any, list[Any], list[_Argument]]]) -> None:
        self.device = made.results[0].device
        self.index = self.device.index or 0
        self.results = [(t.shape, t.stride(), t.dtype) for t in made.results]
        self.scratch = [(t.shape, t.dtype) for t in made.scratch]
        self.runners = runners

    @classmethod
    def of(cls, made: Launches, given: Sequence[torch.Tensor | None]) -> "_PreparedLaunches | None":
        """Prepare launches for calls like this one; None where one reads a tensor that ``make`` derived, as a copy."""
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
                    # No tensor of this call is kept: each call hands in its own.
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
        # Numbers, not tensors: of each tensor Triton asks the driver whether a GPU may read it.
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        stream = driver.active.get_current_stream(self.index)
        for runner, values, arguments in self.runners:
            # Several threads may run it at once, such as autograd's.
            handed = values.copy()
            for place, number, offset, descriptor in arguments:
                if descriptor is None:
                    handed[place] = addresses[number] + offset
                else:
                    handed[place] = _of_another(descriptor, tensors[number])
            runner(*handed, stream=stream)
        return results


_launch_cache: dict[Hashable, _PreparedLaunches | None] = {}
"""By kind, from the second call on; None where launches read copies, and so are worked out each time."""

_seen_once: set[int] = set()
"""Hashes of kinds that came once: tokens of experts may come in another number each time, and are not worth more."""


def run_prepared(kind: Hashable, given: Sequence[torch.Tensor | None]) -> list[torch.Tensor] | None:
    """``run`` of a kind that is prepared; None where it is not."""
    found = _launch_cache.get(_key(kind, given))
    return None if found is None else found.run(given)


def run(
    kind: Hashable, given: Sequence[torch.Tensor | None], make: Callable[[], Launches]
) -> Sequence[torch.Tensor]:
    """Run ``make``'s launches on the current device, which is to be that of the tensors, and return their results.

    Args:
        kind: all that the launches follow from, besides the dtypes, shapes, strides and alignment of ``given``.
        given: what the launches read, None where an operand is left out.
        make: works out the launches, where this kind was not seen before. Their arguments are ``given``, results,
            scratch memory, and parts of flat ones.
    """
    key = _key(kind, given)
    found = _launch_cache.get(key, key)  # None is an entry, too
    if isinstance(found, _PreparedLaunches):
        return found.run(given)
    made = make()
    for launch in made.launches:
        launch.run()
    if found is None:
        return made.results
    if (seen := hash(key)) not in _seen_once:
        if len(_seen_once) >= MOST:
            _seen_once.clear()
        _seen_once.add(seen)
    # The interpreter compiles nothing.
    elif all(launch.compiled is not None for launch in made.launches):
        if len(_launch_cache) >= MOST:
            _launch_cache.clear()
        _launch_cache[key] = _PreparedLaunches.of(made, given)
    return made.results


def _key(kind: Hashable, given: Sequence[torch.Tensor | None]) -> Hashable:
    """Whatever the launches of a call follow from; of addresses only their alignment, and which are the same one."""
    key: list[Hashable] = [kind]
    addresses: list[int | None] = []
    for tensor in given:
        if tensor is None:
            key.append(None)
            addresses.append(None)
            continue
        address = tensor.data_ptr()
        key += tensor.shape, tensor.stride(), tensor.dtype, address % ALIGNMENT, tensor.get_device()
        # One argument stands for a tensor that is given twice.
        key.append(addresses.index(address) if address in addresses else -1)
        addresses.append(address)
    return tuple(key)


def _of_another(descriptor: Any, tensor: torch.Tensor | None) -> Any:
    """Return a descriptor of a tensor that lies as its own does, without its class's checks at each launch."""
    made = object.__new__(type(descriptor))
    made.__dict__.update(descriptor.__dict__)
    made.base = tensor
    return made


def _found(
    value: torch.Tensor, tensors: Sequence[torch.Tensor | None]
) -> tuple[int, int, torch.dtype] | None:
    """Find the tensor that an argument lies in: its number, the argument's first byte in it, and its dtype; or None."""
    address = value.data_ptr()
    there = [(number, tensor) for number, tensor in enumerate(tensors) if tensor is not None]
    for number, tensor in there:
        if tensor.data_ptr() == address:
            return number, 0, tensor.dtype
    for number, tensor in there:
        offset = address - tensor.data_ptr()
        if tensor.dim() == 1 and 0 <= offset < tensor.nbytes:
            return number, offset, tensor.dtype
    return None
