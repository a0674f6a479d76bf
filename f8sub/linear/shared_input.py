"""An x that sibling layers share (q, k, v; gate, up) is quantized once in a forward, and saved once.

The module that owns the siblings opens a scope when its forward begins and closes it when it ends; within it, the
last x quantized is remembered by identity, version, place in memory and formats. Nothing outlives the forward that
made it. Off in inference_mode, where tensors have no version, and under torch.compile, where common subexpressions are
merged anyway. Off too in a function that is checkpointed within the scope: it is repeated in backward, where there is
no scope, and selective checkpointing counts its operators.

A write to x between two siblings counts a version, and ``x.data = t`` changes x's place. Neither is so of a write by
``x.data.mul_()``, through ``x.numpy()`` or another library's view: the next sibling reads the codes from before it.
"""

import itertools
import threading
import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from f8sub.formats import Float8Format
from f8sub.kernels.quantize import quantize
from f8sub.kernels.reference import Quantized
from f8sub.kernels.scales import LayerSource
from f8sub.torch_compat import saved_tensors_hook

Formats = tuple[Float8Format | None, Float8Format | None]


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

    def knows(self, x: torch.Tensor, key: Any) -> bool:
        """Whether what is remembered is of this x, as it is now."""
        return self.x is not None and self.x() is x and self.key == (*_place(x), key)

    def remember(self, x: torch.Tensor, key: Any) -> None:
        """Say that what is remembered is of this x."""
        # A weak reference keeps the storage's address, so that none that x gets later has it.
        self.storage = StorageWeakRef(x.untyped_storage())
        self.x, self.key = weakref.ref(x), (*_place(x), key)


def _place(x: torch.Tensor) -> tuple[int, int, int, tuple[int, ...]]:
    """Version of a tensor, and where it lies."""
    return x._version, x.untyped_storage()._cdata, int(x.storage_offset()), x.stride()


class _Scopes(threading.local):
    """Per thread: autograd recomputes checkpointed forwards on threads of its own."""

    def __init__(self) -> None:
        self.stack: list[_Scope] = []


_scopes = _Scopes()
_events = itertools.count(1)


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


def _scope_of(x: torch.Tensor) -> _Scope | None:
    if torch.compiler.is_compiling() or not _scopes.stack or x.is_inference():
        return None
    scope = _scopes.stack[-1]
    return scope if scope.hook is saved_tensors_hook() else None


def cast_or_share(
    x: torch.Tensor,
    matrix: torch.Tensor,
    formats: Formats,
    source: LayerSource,
    any_layout: bool,
    *,
    is_shared: bool = True,
) -> Quantized:
    """Both operands of ``matrix``, or those of an earlier sibling that was given the same ``x``.

    Each sibling's source keeps the amax.

    Args:
        x: what the layer was called with; the key, with its version and place.
        matrix: (M, K), ``x`` flattened and in the dtype to quantize from.
        formats: (rowwise, columnwise); None for a usage nobody reads.
        source: of the scales.
        any_layout: see ``reference.quantize``.
        is_shared: whether siblings may have been given the same ``x``, and every write to it counts a version.
    """
    scope = _scope_of(x) if is_shared else None
    key = scope and (matrix.dtype, formats, any_layout, source.key)
    if scope is not None and scope.knows(x, key):
        made, event = scope.made, scope.event
    else:
        made = quantize(matrix, *formats, source, any_layout)
        event = None if torch.compiler.is_compiling() else next(_events)
        if scope is not None:
            scope.made, scope.event = made, event
            scope.remember(x, key)
    if made.amax is not None:
        source.keep(made.amax, event)
    return made
