"""An H200 for a compiler to generate code for where there is none: Inductor and Triton are told what the device is."""

from __future__ import annotations

import contextlib
import ctypes
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

NAME, CAPABILITY = "NVIDIA H200", (9, 0)

PROPERTIES = types.SimpleNamespace(
    name=NAME,
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=141 * 2**30,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    L2_cache_size=60 * 2**20,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    gcnArchName="",
    is_integrated=False,
    is_multi_gpu_board=False,
    uuid=None,
)
"""What ``torch.cuda.get_device_properties`` says of one. Source: CUDA C++ programming guide, compute capability 9.0."""

CUDA = "13.0"


@contextlib.contextmanager
def fake_h200() -> Iterator[None]:
    """Within it torch and Triton find one H200, on which code can be generated and nothing can be run."""
    import torch._dynamo.device_interface
    import torch._inductor.utils
    import torch.utils._triton
    import triton.runtime
    from triton.backends.compiler import GPUTarget

    capability = 10 * CAPABILITY[0] + CAPABILITY[1]
    driver = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, PROPERTIES.warp_size),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    interface = torch._dynamo.device_interface.CudaInterface
    of_workers = {"get_device_properties": PROPERTIES, "current_device": 0}
    of_devices = {**of_workers, "is_available": True, "device_count": 1}
    answers = {
        interface.Worker: of_workers,
        interface: {
            **of_devices,
            "get_compute_capability": capability,
            "is_triton_capable": True,
            "raise_if_triton_unavailable": None,
            "is_bf16_supported": True,
            "synchronize": None,
        },
        torch.cuda: {
            **of_devices,
            "get_device_capability": CAPABILITY,
            "get_device_name": NAME,
            "_lazy_init": None,
            "is_initialized": False,
            "get_rng_state": torch.empty(0, dtype=torch.uint8),
            "set_rng_state": None,
            "_exchange_device": -1,
            "_maybe_exchange_device": -1,
        },
    }
    with contextlib.ExitStack() as stack:
        for asked, values in answers.items():
            for name, value in values.items():
                stack.enter_context(mock.patch.object(asked, name, staticmethod(_always(value))))
        stack.enter_context(mock.patch.object(torch.version, "cuda", CUDA))
        stack.enter_context(mock.patch.object(torch.utils._triton, "triton_hash_with_backend", _always("")))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        stack.enter_context(_guarded_by_nothing())
        _forget_triton()
        stack.callback(_forget_triton)
        yield


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


@contextlib.contextmanager
def _guarded_by_nothing() -> Iterator[None]:
    """Give CUDA the device guard of meta tensors, which does nothing: builds without CUDA have none.

    Else no fake tensor on the device can be written to. What is set is c10's table of guards, by ``c10::DeviceType``.
    """
    cuda, meta = 1, 14
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (meta + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    found = guards[cuda]
    guards[cuda] = found or guards[meta]
    try:
        yield
    finally:
        guards[cuda] = found


def _forget_triton() -> None:
    """Have torch look anew for what Triton can do."""
    import torch.utils._triton

    for found in vars(torch.utils._triton).values():
        if hasattr(found, "cache_clear"):
            found.cache_clear()
