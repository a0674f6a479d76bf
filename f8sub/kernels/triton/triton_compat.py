"""Reaches past Triton's documented interface, and knows which names differ between its versions.

No other module of f8sub imports such a name. Each is looked for once, when this module is imported: neither a kernel
nor a launch asks for a version. A name that this Triton lacks is None, and ``why_not`` or ``why_no_gluon`` says so
before anything needs it.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import triton

KNOWN = "3.6, 3.7, 3.8 and 3.9"
"""Versions of Triton with which every kernel is compiled and interpreted by the tests."""

_missing: dict[str, list[str]] = {"triton": [], "triton.experimental": []}


def _name(module: str, *names: str) -> Any:
    """Return the first of some names that a module has, newest first; without names, the module."""
    part = "triton.experimental" if module.startswith("triton.experimental") else "triton"
    try:
        found: Any = importlib.import_module(module)
        for name in names[:-1]:
            if hasattr(found, name):
                return getattr(found, name)
        return getattr(found, names[-1]) if names else found
    except (ImportError, AttributeError):
        _missing[part].append(".".join((module, " or ".join(names))) if names else module)
        return None


PINNED = {"enable_fp_fusion": True}
"""Options of every kernel that do not hang on Triton's version: a product that is added is rounded once, with its sum.

Triton 3.10 is to round twice by default, and ``TRITON_DEFAULT_FP_FUSION=0`` has 3.6 to 3.9 do so.
"""

driver = _name("triton.runtime", "driver")
"""Its ``active`` driver knows the current stream."""

CompiledKernel = _name("triton.compiler", "CompiledKernel")
"""``compiled[programs, 1, 1](*arguments, stream=stream)`` launches it without Triton's own look at the arguments."""

knobs = _name("triton.knobs", "runtime")
"""Has the hooks that profilers set; each is a chain of functions, a function, or None."""

TensorDescriptor = _name("triton.tools.tensor_descriptor", "TensorDescriptor")

INTERPRETED = bool(getattr(knobs, "interpret", False))
"""Whether Triton's interpreter runs the kernels, which cannot run PTX."""

gluon = _name("triton.experimental.gluon")
gl = _name("triton.experimental.gluon.language")
LaidOutDescriptor = _name("triton.experimental.gluon.nvidia.hopper", "TensorDescriptor")

_HOPPER = "triton.experimental.gluon.language.nvidia.hopper"
_ASYNC_COPY = "triton.experimental.gluon.language.nvidia.ampere.async_copy"
mbarrier = _name(_HOPPER, "mbarrier")
fence_async_shared = _name(_HOPPER, "fence_async_shared")
warpgroup_mma = _name(_HOPPER, "warpgroup_mma")
warpgroup_mma_wait = _name(_HOPPER, "warpgroup_mma_wait")

# 3.8 and 3.9 have the first name, 3.6, 3.7 and 3.8 the second one; 3.9 keeps that to raise an error.
load_block = _name(f"{_HOPPER}.tma", "async_load", "async_copy_global_to_shared")
"""Load a block of a descriptor into shared memory by the tensor memory accelerator."""
load_pointers = _name(_ASYNC_COPY, "async_load", "async_copy_global_to_shared")
"""Load what pointers point to into shared memory, by the threads of the warp."""
arrive_when_loaded = _name(_ASYNC_COPY, "mbarrier_arrive")


def launcher(compiled: Any, programs: int) -> Callable[[Any, Sequence[Any]], None]:
    """Return ``compiled[programs, 1, 1]`` that takes a stream and a list of arguments.

    Where no hook is set it leaves out what Triton tells hooks, as the code that Inductor generates does.
    """
    watched, run = compiled[programs, 1, 1], compiled.run
    function, metadata = compiled.function, compiled.packed_metadata

    def launch(stream: Any, arguments: Sequence[Any]) -> None:
        enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            watched(*arguments, stream=stream)
        else:
            run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments)

    return launch


def why_not() -> str | None:
    """Return why f8sub's kernels do not run with this Triton; None where they do."""
    return _lacks("triton")


def why_no_gluon() -> str | None:
    """Return why the kernels for Hopper, which are written in Gluon, do not run with this Triton, or None."""
    return why_not() or _lacks("triton.experimental")


def _lacks(part: str) -> str | None:
    if not _missing[part]:
        return None
    found = f"is {triton.__version__}, which has no {', no '.join(_missing[part])}"
    return f"{found}; f8sub's kernels are known to work with {KNOWN}: install one of those"
