"""A Triton kernel of a user's, which torch.compile takes into its graph; needs Triton, and is interpreted on a CPU."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


def _scale(ptr, count, by, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(ptr + at, tl.load(ptr + at, mask=inside) * by, mask=inside)


kernel: Any = JITFunction(_scale)
"""Of the class that dynamo looks for, which ``triton.jit`` does not make where kernels are interpreted."""


def scale(weight: torch.Tensor) -> None:
    """Multiply a weight by 20 in place."""
    kernel[(triton.cdiv(weight.numel(), 64),)](weight, weight.numel(), 20.0, BLOCK=64)


@contextlib.contextmanager
def interpreted() -> Iterator[mock.Mock]:
    """Have the kernel run in Python, and torch.compile know it, whatever the machine has; counts its runs."""
    counted = mock.Mock()

    def run(function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        counted()
        # The rest says how to compile it.
        of_kernel = {name: value for name, value in kwargs.items() if name in function.arg_names}
        InterpretedFunction(function.fn)[grid](*args, **of_kernel)

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch("torch.utils._triton.has_triton", return_value=True),
    ):
        yield counted
