"""A process in which Triton's kernels are interpreted, on the CPU.

One of its own: TRITON_INTERPRET is read when triton is imported, and the tests' process compiles kernels elsewhere.
"""

import contextlib
import functools
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.ranks import make_collections_rare

HAS_TRITON = importlib.util.find_spec("triton") is not None
WITHOUT = "triton is not installed; it comes with torch for CUDA"
interpreted = pytest.mark.interpreted
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason=WITHOUT)
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def in_interpreter(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a module's function in that process; of a test that is marked ``interpreted``, too."""
    if not HAS_TRITON:
        pytest.skip(WITHOUT)
    return _process().submit(function, *arguments).result()


@functools.cache
def _process() -> ProcessPoolExecutor:
    """One for all test modules: to begin it takes seconds."""
    return ProcessPoolExecutor(1, get_context("spawn"), _start)


def _start() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    make_collections_rare()
    # NaN and the inverse of an amax of 0 are what some tests are about.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="numpy|triton")
    np.seterr(all="ignore")
    repair()
    patch_once()
    take_any_device()


@contextlib.contextmanager
def launched() -> Iterator[list[str]]:
    """Names of the kernels that are launched meanwhile."""
    from f8sub.kernels.triton import launch

    names, run = [], launch.Launch.run

    def seen(launch: launch.Launch) -> None:
        names.append(launch.kernel.fn.__name__)
        run(launch)

    with mock.patch.object(launch.Launch, "run", seen):
        yield names


def take_any_device() -> None:
    """Have the kernels take what is on the CPU, whatever the machine has."""
    from f8sub.kernels.triton import support

    def takes(x: torch.Tensor) -> bool:
        return type(x) is torch.Tensor and x.numel() > 0

    support.takes = takes
    support.device_of = contextlib.nullcontext


def exp(x: Any) -> Any:
    """CUDA's exponential of float32: of what the kernels make with it half precision does not show the last bits."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    values = torch.exp(torch.from_numpy(np.ascontiguousarray(x.handle.data)))
    return tl.core.tensor(TensorHandle(values.numpy(), x.handle.dtype), x.type)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``a * b + c`` of float32, rounded once: a float64 sum that is not exact is made odd before it is rounded."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = np.asarray(product + addend)
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (lost != 0) & (bits & 1 == 0)
    odd = np.where(inexact, bits + np.where((lost > 0) == (total > 0), 1, -1), bits)
    return odd.view(np.float64).astype(np.float32)


def patch_once() -> None:
    """Have the interpreter patch triton.language when a module's first function is called, and leave it so.

    It does at each call, of functions that kernels call too, which is more than a third of what tests take.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, {}

    def patch_for(function: Any) -> Any:
        names = function.__globals__
        if id(names) not in patched:
            patched[id(names)] = names
            patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_for


def repair() -> None:
    """Make the interpreter of Triton 3.6 to 3.9 compute as the hardware does.

    Its casts to float8 and bfloat16 lose the carry of a rounded mantissa or do not round; its maximum and minimum,
    which the hardware takes of numbers alone, are NaN where one of two is, before 3.9; a fused multiplication and
    addition is rounded twice; CUDA's library it has not. 3.6 does not know numpy 2.4, which makes no number of an array
    of one dimension. What two numbers are compared to has the dtype of the numbers once it is spread over a block, and
    3.9 refuses such a mask, which to its compiler is an int1.
    """
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    dtypes = {
        tl.float64: torch.float64,
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }
    original = interpreter._convert_float

    def convert(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source not in dtypes or target not in dtypes:
            return original(values, source, target, rounding)
        bits = np.ascontiguousarray(values).view(UNSIGNED[source.primitive_bitwidth // 8])
        converted = torch.from_numpy(bits).view(dtypes[source]).to(dtypes[target])
        return converted.view(torch.uint8).numpy().view(UNSIGNED[target.primitive_bitwidth // 8])

    interpreter._convert_float = convert
    prepare = interpreter._patch_lang_tensor

    def prepare_and_index(tensor: Any, scope: Any) -> None:
        prepare(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = prepare_and_index
    libdevice.exp = exp
    interpreter.InterpreterBuilder.create_fma = lambda self, x, y, z: interpreter.TensorHandle(
        fma(x.data, y.data, z.data), z.dtype.scalar
    )
    interpreter.InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    interpreter.InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    interpreter.InterpreterBuilder.create_splat = lambda self, kind, number: interpreter.TensorHandle(
        np.full(kind.shape, number.data.reshape(-1)[0], number.data.dtype), number.dtype.scalar
    )
