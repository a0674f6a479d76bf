"""An x that several layers read, or tokens that several products of experts read, quantized once in a forward.

Layers that read one x (q, k, v; gate, up) quantize it once in a forward, and save it once. The module that owns them
opens a scope when its forward begins and closes it when it ends. Within the scope the last x quantized is known by
identity, version, place in memory and formats; nothing outlives the forward. Where backward makes the columnwise
operand, each sibling makes its own.

There is no sharing in inference_mode, where tensors have no version, nor under torch.compile, which merges common
subexpressions anyway. Nor in a function that is checkpointed within the scope: backward repeats it where there is no
scope, and selective checkpointing counts its operators.

A write to x between two siblings counts a version, and ``x.data = t`` changes x's place. A write by ``x.data.mul_()``,
through ``x.numpy()`` or through another library's view does neither: the next sibling reads the codes from before it.

Tokens of experts, such as those of gate and up, are known likewise, with the ends of their groups, in the scope of the
forward of a converted module.
"""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from f8sub.formats import Float8Format
from f8sub.kernels.gemm.select import Plan
from f8sub.kernels.grouped.operands import Groups
from f8sub.kernels.grouped.quantize import CastTokens, cast_tokens
from f8sub.kernels.quantize import quantize
from f8sub.kernels.reference import Quantized
from f8sub.kernels.scales import LayerSource, Sources
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


class _SeenTokens:
    """A tensor as it was, without keeping it alive; its storage's address is kept, so that no other tensor gets it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference, self._state = weakref.ref(tensor), _state(tensor)
        self._storage = StorageWeakRef(tensor.untyped_storage())

    def is_of(self, tensor: torch.Tensor) -> bool:
        return self._reference() is tensor and self._state == _state(tensor)


def _state(tensor: torch.Tensor) -> Any:
    return tensor._version, tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.stride()


class _TokenScope:
    """One forward of a module: the ends that it passed last, and the tokens that were cast last."""

    def __init__(self) -> None:
        self.hook = saved_tensors_hook()
        self.offs: _SeenTokens | None = None
        self.ends: torch.Tensor | None = None
        self.x: _SeenTokens | None = None
        self.key: Any = None
        self.made = CastTokens(None, None, None)
        self.event: int | None = None


class _TokenScopes(threading.local):
    """Per thread: autograd recomputes checkpointed forwards on threads of its own."""

    def __init__(self) -> None:
        self.stack: list[_TokenScope] = []


_token_scopes = _TokenScopes()


@contextlib.contextmanager
def sharing_tokens() -> Iterator[None]:
    """Products within it cast tokens once that they share."""
    _token_scopes.stack.append(_TokenScope())
    try:
        yield
    finally:
        _token_scopes.stack.pop()


def _token_scope_for(*tensors: torch.Tensor) -> _TokenScope | None:
    if torch.compiler.is_compiling() or not _token_scopes.stack:
        return None
    scope = _token_scopes.stack[-1]
    plain = all(type(tensor) is torch.Tensor and not tensor.is_inference() for tensor in tensors)
    return scope if plain and scope.hook is saved_tensors_hook() else None


def ends_of(offs: torch.Tensor) -> torch.Tensor:
    """``offs`` as int32: the same tensor for products of one forward that are given the same ``offs``."""
    scope = _token_scope_for(offs)
    if scope is None:
        return offs.to(torch.int32)
    if scope.ends is None or scope.offs is None or not scope.offs.is_of(offs):
        scope.offs, scope.ends, scope.x = _SeenTokens(offs), offs.to(torch.int32), None
    return scope.ends


def cast_or_share_tokens(
    x: torch.Tensor,
    dtype: torch.dtype,
    groups: Groups,
    formats: tuple[Float8Format | None, Float8Format | None],
    multiple: int,
    source: LayerSource,
) -> CastTokens:
    """``cast_tokens`` of ``x.to(dtype)``, or what an earlier product of the same forward made of the same tokens.

    The source keeps the amax.
    """
    scope = _token_scope_for(x, groups.ends)
    if scope is None or groups.ends is not scope.ends:
        made = cast_tokens(x.to(dtype), groups, *formats, multiple, source.prior())
        event = None if torch.compiler.is_compiling() else next(events)
    else:
        key = dtype, formats, multiple, source.key
        if scope.x is None or scope.key != key or not scope.x.is_of(x):
            scope.made = cast_tokens(x.to(dtype), groups, *formats, multiple, source.prior())
            scope.x, scope.key, scope.event = _SeenTokens(x), key, next(events)
        made, event = scope.made, scope.event
    if made.amax is not None:
        source.keep(made.amax, event)
    return made
