"""Tokens that several products of one forward read, such as gate and up, are cast once, and saved once.

The forward of a converted module opens a scope. In it the last tokens that were cast are known by identity, version and
place in memory, and so are the ends of their groups; nothing outlives the forward.

Nothing is shared in inference_mode, where tensors have no version, nor under ``torch.compile``, which merges equal
nodes itself. Nor in a function that is checkpointed within the scope: backward repeats it where there is no scope.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from f8sub.formats import Float8Format
from f8sub.kernels.grouped.operands import Groups
from f8sub.kernels.grouped.quantize import CastTokens, cast_tokens
from f8sub.kernels.scales import LayerSource
from f8sub.linear.shared_input import events
from f8sub.torch_compat import saved_tensors_hook


class _Seen:
    """A tensor as it was, without keeping it alive; its storage's address is kept, so that no other tensor gets it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference, self._state = weakref.ref(tensor), _state(tensor)
        self._storage = StorageWeakRef(tensor.untyped_storage())

    def is_of(self, tensor: torch.Tensor) -> bool:
        return self._reference() is tensor and self._state == _state(tensor)


def _state(tensor: torch.Tensor) -> Any:
    return tensor._version, tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.stride()


class _Scope:
    """One forward of a module: the ends that it passed last, and the tokens that were cast last."""

    def __init__(self) -> None:
        self.hook = saved_tensors_hook()
        self.offs: _Seen | None = None
        self.ends: torch.Tensor | None = None
        self.x: _Seen | None = None
        self.key: Any = None
        self.made = CastTokens(None, None, None)
        self.event: int | None = None


class _Scopes(threading.local):
    """Per thread: autograd recomputes checkpointed forwards on threads of its own."""

    def __init__(self) -> None:
        self.stack: list[_Scope] = []


_scopes = _Scopes()


@contextlib.contextmanager
def sharing() -> Iterator[None]:
    """Products within it cast tokens once that they share."""
    _scopes.stack.append(_Scope())
    try:
        yield
    finally:
        _scopes.stack.pop()


def _scope_for(*tensors: torch.Tensor) -> _Scope | None:
    if torch.compiler.is_compiling() or not _scopes.stack:
        return None
    scope = _scopes.stack[-1]
    plain = all(type(tensor) is torch.Tensor and not tensor.is_inference() for tensor in tensors)
    return scope if plain and scope.hook is saved_tensors_hook() else None


def ends_of(offs: torch.Tensor) -> torch.Tensor:
    """``offs`` as int32: the same tensor for products of one forward that are given the same ``offs``."""
    scope = _scope_for(offs)
    if scope is None:
        return offs.to(torch.int32)
    if scope.ends is None or scope.offs is None or not scope.offs.is_of(offs):
        scope.offs, scope.ends, scope.x = _Seen(offs), offs.to(torch.int32), None
    return scope.ends


def cast_or_share(
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
    scope = _scope_for(x, groups.ends)
    if scope is None or groups.ends is not scope.ends:
        made = cast_tokens(x.to(dtype), groups, *formats, multiple, source.prior())
        event = None if torch.compiler.is_compiling() else next(events)
    else:
        key = dtype, formats, multiple, source.key
        if scope.x is None or scope.key != key or not scope.x.is_of(x):
            scope.made = cast_tokens(x.to(dtype), groups, *formats, multiple, source.prior())
            scope.x, scope.key, scope.event = _Seen(x), key, next(events)
        made, event = scope.made, scope.event
    if made.amax is not None:
        source.keep(made.amax, event)
    return made
