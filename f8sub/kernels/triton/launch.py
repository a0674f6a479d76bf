"""Launches kernels as data, and keeps what a launch of one kind was compiled to and how its arguments follow.

Triton binds, types and hashes every argument at every launch, which is most of what a launch costs the host
(scripts/bench/launches.py). So what it compiled for arguments of some kind is kept here and launched by itself.

``run`` prepares launches over tensors of one kind when they come for the second time, see ``prepared``.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from f8sub.kernels.triton import prepared
from f8sub.kernels.triton.support import ALIGNMENT
from f8sub.kernels.triton.triton_compat import INTERPRETED, PINNED, CompiledKernel, driver, launcher

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


_seen_once: set[int] = set()
"""Hashes of kinds that came once: tokens of experts may come in another number each time, and are not worth more."""


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
    key, addresses = prepared.key_of(kind, given)
    found = prepared.cache.get(key, key)  # None is an entry, too
    if isinstance(found, prepared.PreparedLaunches):
        return found.run(given, addresses)
    made = make()
    for launch in made.launches:
        launch.run()
    if found is None:
        return made.results
    if (seen := hash(key)) not in _seen_once:
        if len(_seen_once) >= prepared.MOST:
            _seen_once.clear()
        _seen_once.add(seen)
    # The interpreter compiles nothing.
    elif all(launch.compiled is not None for launch in made.launches):
        prepared.keep(key, prepare(made, given))
    return made.results


def prepare(made: Launches, given: Sequence[torch.Tensor | None]) -> prepared.PreparedLaunches | None:
    """Prepare launches, which ran, for calls like this one.

    Args:
        made: what ran.
        given: what the launches read or write besides results and scratch, None where an operand is left out.

    Returns:
        None where a launch reads a tensor that was derived of ``given``, as a copy is.
    """
    tensors = [*given, *made.results, *made.scratch]
    device = next(tensor.device for tensor in tensors if tensor is not None)
    launches = []
    for launch in made.launches:
        arguments: list[Any] = []
        for value in [launch.arguments[name] for name in launch.kernel.arg_names]:
            descriptor = value if hasattr(value, "block_shape") else None
            tensor = value if descriptor is None else value.base
            if not isinstance(tensor, torch.Tensor):
                arguments.append(value)
                continue
            found = _found(tensor, tensors)
            if found is None or (descriptor is not None and found[1:] != (0, tensor.dtype)):
                return None
            # No tensor of this call is kept: each call hands in its own.
            kept = None if descriptor is None else prepared.of_another(descriptor, None)
            arguments.append(prepared.Argument(*found[:2], kept))
        if launch.compiled is None:
            raise RuntimeError(f"{launch.kernel} was not compiled")
        launches.append((launcher(launch.compiled, launch.programs), arguments))
    asked = prepared.Driver(driver.active.get_current_device, driver.active.get_current_stream)
    return prepared.PreparedLaunches(device, len(given), made.results, made.scratch, launches, asked)


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
