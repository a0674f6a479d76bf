"""A kernel over a matrix as data, and its launch.

Triton binds, types and hashes every argument at every launch, which is most of what a launch costs the host
(scripts/bench/launches.py). So what it compiled for arguments of some kind is kept here and launched by itself.
"""

from typing import Any, NamedTuple

import torch

from f8sub.kernels.triton.support import ALIGNMENT
from f8sub.kernels.triton.triton_compat import INTERPRETED, PINNED, CompiledKernel

MOST = 4096
"""Kernels that are kept; then all of them are forgotten, and Triton's own cache is asked again."""

_compiled: dict[Any, CompiledKernel] = {}
_constants: dict[Any, list[bool]] = {}
"""Of a kernel's function: which arguments are constants, by whose value Triton compiles."""


class Launch(NamedTuple):
    """One kernel over one matrix.

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
        """What ``run`` launches, once it did; None where the interpreter runs the kernel."""
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
            known[self.programs, 1, 1](*values)
            return
        compiled = self.kernel[(self.programs,)](*values, **self.compile_options)
        # The interpreter compiles nothing.
        if isinstance(compiled, CompiledKernel):
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
