"""An x that several layers read, quantized once in a forward.

Layers that read one x (q, k, v; gate, up) quantize it once in a forward, and save it once. The module that owns them
opens a scope when its forward begins and closes it when it ends. Within the scope the last x quantized is known by
identity, version, place in memory and formats; nothing outlives the forward. Where backward makes the columnwise
operand, each sibling makes its own.

There is no sharing in inference_mode, where tensors have no version, nor under torch.compile, which merges common
subexpressions anyway. Nor in a function that is checkpointed within the scope: backward repeats it where there is no
scope, and selective checkpointing counts its operators.

A write to x between two siblings counts a version, and ``x.data = t`` changes x's place. A write by ``x.data.mul_()``,
through ``x.numpy()`` or through another library's view does neither: the next sibling reads the codes from before it.
"""

import itertools
import threading
import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from f8sub.formats import Float8Format
from f8sub.kernels.gemm.select import Plan
from f8sub.kernels.quantize import quantize
from f8sub.kernels.reference import Quantized
from f8sub.kernels.scales import Sources
from f8sub.torch_compat import saved_tensors_hook

Call = tuple[Plan, torch.dtype, Sources]
"""What one call of a layer multiplies by: its plan, the high-precision dtype of its GEMMs, the sources of scales."""

Formats = tuple[Float8Format | None, Float8Format | None]

events = itertools.count(1)
"""Numbers of the x's that were quantized in eager code."""


class _Scope:
    """One forward of a module with sibling layers: the last x quantized in it."""

    __slots__ = ("event", "hook", "key", "made", "owner", "storage", "x")

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.hook = saved_tensors_hook()
        self.x: weakref.ref[torch.Tensor] | None = None
        self.storage: StorageWeakRef | None = None
        self.key: Any = None
        self.made = Quantized(None, None)
        self.event: int | None = None


class _Scopes(threading.local):
    """Per thread: autograd recomputes checkpointed forwards on threads of its own."""

    def __init__(self) -> None:
        self.stack: list[_Scope] = []


_scopes = _Scopes()


def open_scope(module: torch.nn.Module, args: Any) -> None:
    """Forward pre-hook of a module whose children may share an input.

    A scope of the same module that is still open is of a forward that was interrupted: torch calls no hook after
    KeyboardInterrupt.
    """
    if not torch.compiler.is_compiling():
        close_scope(module, args, None)
        _scopes.stack.append(_Scope(id(module)))


def close_scope(module: torch.nn.Module, args: Any, output: Any) -> None:
    """Forward hook of the same module, called even when its forward raised."""
    if torch.compiler.is_compiling():
        return
    stack = _scopes.stack
    if any(scope.owner == id(module) for scope in stack):
        while stack.pop().owner != id(module):
            pass


def cast_or_share(x: torch.Tensor, matrix: torch.Tensor, formats: Formats, call: Call) -> Quantized:
    """``cast_anew``, or what an earlier sibling made of the same ``x``; the source of each keeps the amax."""
    plan, _, sources = call
    # Nobody counts all writes to the local tensor of a distributed x.
    if sources.distributed or not _scopes.stack or x.is_inference():
        return cast_anew(x, matrix, formats, call)
    scope, source, any_layout = _scopes.stack[-1], sources.x, plan.any_layout
    if scope.hook is not saved_tensors_hook():
        return cast_anew(x, matrix, formats, call)
    storage = x.untyped_storage()
    place = x._version, storage._cdata, int(x.storage_offset()), x.stride()
    key = place, matrix.dtype, formats, any_layout, source.key
    if scope.x is None or scope.x() is not x or scope.key != key:
        scope.made, scope.event = quantize(matrix, *formats, source, any_layout), next(events)
        # A weak reference keeps the storage's address, so that none that x gets later has it.
        scope.storage = StorageWeakRef(storage)
        scope.x, scope.key = weakref.ref(x), key
    if scope.made.amax is not None:
        source.keep(scope.made.amax, scope.event)
    return scope.made


def cast_anew(x: torch.Tensor, matrix: torch.Tensor, formats: Formats, call: Call) -> Quantized:
    """Both operands of ``matrix``, (M, K): ``x`` as it is quantized. The source keeps the amax."""
    plan, _, sources = call
    made = quantize(matrix, *formats, sources.x, plan.any_layout)
    if made.amax is not None:
        sources.x.keep(made.amax, None if torch.compiler.is_compiling() else next(events))
    return made
