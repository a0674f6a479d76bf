"""Layer 4. An x that sibling layers share (q, k, v; gate, up) is quantized once in a forward, and saved once.

The module that owns the siblings opens a scope when its forward begins and closes it when it ends; within it, the
last x quantized is remembered by identity, version and formats. Nothing outlives the forward that made it. Off in
inference_mode, where tensors have no version, and under torch.compile, where common subexpressions are merged
anyway. Off too in a function that is checkpointed within the scope: it is repeated in backward, where there is no
scope, and selective checkpointing counts its operators.
"""

import itertools
import threading
import weakref
from typing import Any

import torch

from f8sub.formats import Float8Format, Operand
from f8sub.scaling_state import Past, ScalingState, X, quantize_delayed
from f8sub.tensor import normed_tensor
from f8sub.torch_compat import saved_tensors_hook

Formats = tuple[Float8Format | None, Float8Format | None]


class _Scope:
    """One forward of a module with sibling layers: the last x quantized in it."""

    __slots__ = ("amax", "hook", "key", "number", "operands", "owner", "x")

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.hook = saved_tensors_hook()
        self.x: weakref.ref[torch.Tensor] | None = None
        self.key: Any = None
        self.operands: tuple[Operand | None, Operand | None] = (None, None)
        self.amax: torch.Tensor | None = None
        self.number = 0


class _Scopes(threading.local):
    """Per thread: autograd recomputes checkpointed forwards on threads of its own."""

    def __init__(self) -> None:
        self.stack: list[_Scope] = []


_scopes = _Scopes()
_numbers = itertools.count(1)


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


def quantize_input(
    x: torch.Tensor, matrix: torch.Tensor, formats: Formats, any_layout: bool
) -> tuple[Operand | None, Operand | None]:
    """Both operands of ``matrix``, or those of an earlier sibling that was given the same ``x``.

    Args:
        x: what the layer was called with; its identity and version are the key.
        matrix: (M, K), ``x`` flattened and in the dtype to quantize from; what a fused norm returned, as it came.
        formats: (rowwise, columnwise); None for a usage nobody reads.
        any_layout: see ``reference.quantize``.
    """
    scope = _scope_of(x)
    if scope is None:
        return normed_tensor.quantize(matrix, *formats, any_layout)
    key = (x._version, matrix.dtype, formats, any_layout)
    if scope.x is None or scope.x() is not x or scope.key != key:
        scope.operands = normed_tensor.quantize(matrix, *formats, any_layout)
        scope.x, scope.key = weakref.ref(x), key
    return scope.operands


def quantize_input_delayed(
    x: torch.Tensor, matrix: torch.Tensor, formats: Formats, any_layout: bool, past: Past
) -> tuple[Operand | None, Operand | None]:
    """``quantize_input`` with a scale of the layer's past; each sibling stages the amax in its own history.

    Siblings whose x's were the same ones all along have one history, so that the scale of the first is theirs too; one
    that was called less often, or with another x, is scaled by its own.

    Args:
        x: see ``quantize_input``.
        matrix: likewise.
        formats: likewise.
        any_layout: likewise.
        past: of the layer.
    """
    if torch.compiler.is_compiling() or x.is_inference():
        return quantize_delayed(past, X, normed_tensor.plain(matrix), formats, any_layout)
    if formats == (None, None):
        return formats
    scope = _scope_of(x) or _Scope(0)
    key = (x._version, matrix.dtype, formats, any_layout, past.state.recipe, past.frozen, past.state.x_past)
    if scope.x is None or scope.x() is not x or scope.key != key:
        made = normed_tensor.quantize_delayed(matrix, past.scale(X), *formats, any_layout)
        row, col, scope.amax = made
        scope.operands = row, col
        scope.x, scope.key, scope.number = weakref.ref(x), key, next(_numbers)
    if past.stage and scope.amax is not None:
        past.state.stage(X, scope.amax)
        past.state.x_past = hash((past.state.x_past, scope.number))
    return scope.operands


def is_like_no_other(state: ScalingState) -> None:
    """Say that a layer was given an x that no sibling was; see ``quantize_input_delayed``."""
    if not torch.compiler.is_compiling():
        state.x_past = hash((state.x_past, next(_numbers)))
