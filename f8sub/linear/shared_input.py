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
from typing import Any, overload

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from f8sub.formats import Float8Format
from f8sub.kernels.gemm.select import Plan
from f8sub.kernels.grouped.operands import Groups, QuantizedTokens
from f8sub.kernels.quantize import quantize
from f8sub.kernels.reference import Quantized
from f8sub.kernels.scales import Sources
from f8sub.torch_compat import saved_tensors_hook

Call = tuple[Plan, torch.dtype, Sources]
"""One call of a layer: its plan, the high-precision dtype of its GEMMs, the sources of scales."""

Formats = tuple[Float8Format | None, Float8Format | None]

events = itertools.count(1)
"""Numbers of the x's that were quantized in eager code."""


class _Seen:
    """A tensor as it was, without keeping it alive.

    A weak reference keeps its storage's address, so that none that it gets later has it, nor any other tensor.
    """

    __slots__ = ("_reference", "_state", "_storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference, self._state = weakref.ref(tensor), _state(tensor)
        self._storage = StorageWeakRef(tensor.untyped_storage())

    def is_of(self, tensor: torch.Tensor) -> bool:
        return self._reference() is tensor and self._state == _state(tensor)


def _state(tensor: torch.Tensor) -> Any:
    return tensor._version, tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.stride()


class _Scope:
    """One forward of a module: what was quantized in it last, and the ends of groups that it passed last."""

    __slots__ = ("ends", "event", "hook", "key", "made", "offs", "owner", "x")

    def __init__(self, owner: int) -> None:
        self.owner = owner
        # By its hook a function that is checkpointed within the scope is told from the scope's own forward.
        self.hook = saved_tensors_hook()
        self.x: _Seen | None = None
        self.key: Any = None
        self.made: Any = None
        self.event: int | None = None
        self.offs: _Seen | None = None
        self.ends: torch.Tensor | None = None


class _Scopes(threading.local):
    """Per thread: autograd recomputes checkpointed forwards on threads of its own."""

    def __init__(self) -> None:
        self.stack: list[_Scope] = []
        self.of_tokens: list[_Scope] = []


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
    # Scopes above this module's are of forwards that were interrupted: torch called none of their hooks.
    if any(scope.owner == id(module) for scope in stack):
        while stack.pop().owner != id(module):
            pass


@contextlib.contextmanager
def sharing_tokens() -> Iterator[None]:
    """Products within it cast tokens once that they share."""
    _scopes.of_tokens.append(_Scope(0))
    try:
        yield
    finally:
        _scopes.of_tokens.pop()


def _scope_in(stack: list[_Scope], x: torch.Tensor) -> _Scope | None:
    """The innermost scope; None where ``x`` cannot be known again, or a function is checkpointed within the scope."""
    if not stack or x.is_inference() or stack[-1].hook is not saved_tensors_hook():
        return None
    return stack[-1]


def _scope_for(x: torch.Tensor, sources: Sources, groups: Groups | None) -> _Scope | None:
    if groups is None:
        # Nobody counts all writes to the local tensor of a distributed x.
        return None if sources.distributed else _scope_in(_scopes.stack, x)
    scope = _scope_in(_scopes.of_tokens, x)
    return None if scope is None or groups.ends is not scope.ends else scope


def ends_of(offs: torch.Tensor) -> torch.Tensor:
    """``offs`` as int32: the same tensor for products of one forward that are given the same ``offs``."""
    if torch.compiler.is_compiling() or type(offs) is not torch.Tensor:
        return offs.to(torch.int32)
    if (scope := _scope_in(_scopes.of_tokens, offs)) is None:
        return offs.to(torch.int32)
    if scope.ends is None or scope.offs is None or not scope.offs.is_of(offs):
        # Tokens that were cast for other ends are cast again.
        scope.offs, scope.ends, scope.x = _Seen(offs), offs.to(torch.int32), None
    return scope.ends


@overload
def cast_or_share(
    x: torch.Tensor, matrix: torch.Tensor, formats: Formats, plan: Plan, sources: Sources, groups: None = None
) -> Quantized: ...


@overload
def cast_or_share(
    x: torch.Tensor, matrix: torch.Tensor, formats: Formats, plan: Plan, sources: Sources, groups: Groups
) -> QuantizedTokens: ...


def cast_or_share(
    x: torch.Tensor,
    matrix: torch.Tensor,
    formats: Formats,
    plan: Plan,
    sources: Sources,
    groups: Groups | None = None,
) -> Quantized | QuantizedTokens:
    """Both operands of ``matrix``, or what an earlier sibling made of the same ``x``; the source keeps the amax.

    Args:
        x: what the product was called with.
        matrix: ``x``, (M, K), in the dtype that is cast.
        formats: rowwise and columnwise.
        plan: of the product.
        sources: of the call.
        groups: of tokens, whose ends are of ``ends_of``; None for a linear layer's x.
    """
    source = sources.x
    is_compiled = torch.compiler.is_compiling()
    scope = None if is_compiled else _scope_for(x, sources, groups)
    multiple = 1 if groups is None else plan.multiple
    # A sibling that needs other codes of the same x makes its own.
    key = matrix.dtype, formats, plan.any_layout, multiple, source.key
    if scope is not None and scope.x is not None and scope.key == key and scope.x.is_of(x):
        made, event = scope.made, scope.event
    else:
        made = quantize(matrix, *formats, source, plan.any_layout, groups, multiple)
        event = None if is_compiled else next(events)
        if scope is not None:
            # The last one alone: siblings follow each other, and older codes would only take memory.
            scope.x, scope.key, scope.made, scope.event = _Seen(x), key, made, event
    # Each sibling's source keeps the amax, and knows by the event that it is of one x.
    if made.amax is not None:
        source.keep(made.amax, event)
    return made  # type: ignore[no-any-return]
