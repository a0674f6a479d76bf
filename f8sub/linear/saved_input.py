"""x: quantized in forward, once for siblings that share it, what is saved of it for wgrad, and read in backward.

| kept             | forward makes       | saved                          | backward makes columnwise of |
| ---------------- | ------------------- | ------------------------------ | ---------------------------- |
| "float8"         | rowwise, columnwise | columnwise codes               |                              |
| "high_precision" | rowwise             | x itself                       | x                            |
| "recompute"      | rowwise             | rowwise codes                  | the rowwise codes            |

"auto" is the second where the operator that made x saves it anyway, as attention saves its result; else the first.
``torch.compile`` cannot see that, and hooks for saved tensors (checkpointing, offloading) may pack each tensor by
itself: there "auto" is the first.

The first two have the same numbers, bitwise. So has the third where codes are transposed; where they are re-encoded see
``reference.derive_columnwise``. A recipe whose wgrad reads x in high precision has it saved so in any case, and an x
that came in float8 stays as it came.

[Note: an x that siblings share]

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
from typing import Any, NamedTuple, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from f8sub.formats import Float8Format, Operand, why_not_derivable
from f8sub.kernels.gemm.select import Plan
from f8sub.kernels.ops import copy_after, derive_columnwise_in_backward
from f8sub.kernels.quantize import quantize
from f8sub.kernels.reference import Quantized
from f8sub.kernels.scales import GivenScale, PriorScale, ScaleSource, Sources
from f8sub.recipe import Recipe
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import is_saved_by_its_maker, saved_tensors_hook

GemmInput = Operand | torch.Tensor
"""An operand in float8, or a matrix where the GEMM stays in high precision."""

Call = tuple[Plan, torch.dtype, Sources]
"""What one call of a layer multiplies by: its plan, the high-precision dtype of its GEMMs, the sources of scales."""

Formats = tuple[Float8Format | None, Float8Format | None]
Present = TypeVar("Present", Operand, Float8Format)

AUTO, FLOAT8, HIGH_PRECISION, RECOMPUTE = KEEP_X = ("auto", "float8", "high_precision", "recompute")
"""What a layer can be asked to keep of x."""


class Kept(NamedTuple):
    """What a forward saved of x, besides the tensors.

    Attributes:
        how: one of ``KEEP_X`` but "auto".
        is_known: of the ``PriorScale`` that the forward had, where backward casts with it again.
    """

    how: str
    is_known: bool = False


CODES, IN_HIGH_PRECISION, ROWWISE_CODES = Kept(FLOAT8), Kept(HIGH_PRECISION), Kept(RECOMPUTE)


def why_not_kept(recipe: Recipe, keep_x: str) -> str | None:
    """Why layers of a recipe cannot keep x so; None when they can."""
    rowwise, columnwise = recipe.formats("x")
    if columnwise is None or keep_x in (AUTO, FLOAT8):
        return None
    if keep_x == HIGH_PRECISION:
        if rowwise is None and recipe.scaling is not None:
            return f"its fprop does not cast x, whose amax {type(recipe.scaling).__name__} takes in forward"
        return None
    if rowwise is None:
        return "its fprop does not cast x, so that there are no codes to derive any from"
    return why_not_derivable(rowwise, columnwise)


def reencodes(recipe: Recipe) -> bool:
    """Whether "recompute" makes other codes than "float8": re-scaled ones, where no byte transpose will do."""
    rowwise, columnwise = recipe.formats("x")
    return not (rowwise is None or columnwise is None or rowwise.tile.is_transpose_of(columnwise.tile))


def cast_x(
    x: torch.Tensor, call: Call, keep_x: str | None
) -> tuple[GemmInput, tuple[torch.Tensor, ...], Kept]:
    """What fprop reads of x, what is saved of it for wgrad, and how ``x_columnwise`` is to read that.

    Args:
        x: (..., K), what the layer was called with; may be a Float8Tensor where ``sources.distributed``, with the
            rowwise operand that the recipe reads.
        call: with the dtype that x is cast from.
        keep_x: one of ``KEEP_X``; None where there will be no wgrad.
    """
    plan, dtype, sources = call
    matrix = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if x.dtype is not dtype:
        matrix = matrix.to(dtype)
    rowwise, columnwise = plan.recipe.fprop.a, plan.recipe.wgrad.b
    if sources.distributed and isinstance(matrix, Float8Tensor):
        received = present(matrix.rowwise)
        if columnwise is None:
            return received, () if keep_x is None else (matrix,), IN_HIGH_PRECISION
        return received, () if keep_x is None else received.tensors, ROWWISE_CODES
    how = keep_x
    if keep_x == AUTO:
        free = is_saved_by_its_maker(x) and why_not_kept(plan.recipe, HIGH_PRECISION) is None
        how = HIGH_PRECISION if free else FLOAT8
    formats = rowwise, columnwise if how == FLOAT8 else None
    made = cast_or_share(x, matrix, formats, call)
    row = made.rowwise
    if how is None:
        return row or matrix, (), CODES
    if columnwise is None:
        return row or matrix, (matrix,), IN_HIGH_PRECISION
    if how == FLOAT8:
        return row or matrix, present(made.columnwise).tensors, CODES
    if how == RECOMPUTE:
        return present(row), present(row).tensors, ROWWISE_CODES
    prior = sources.x.prior()
    if prior is None:
        return row or matrix, (x,), IN_HIGH_PRECISION
    # A copy: a feature may make another scale before backward.
    return row or matrix, (x, prior.scale.clone()), Kept(HIGH_PRECISION, prior.is_known)


def x_columnwise(saved: list[torch.Tensor], kept: Kept, call: Call, after: torch.Tensor) -> GemmInput:
    """``x``'s columnwise operand, of what ``cast_x`` saved; ``after`` as ``derive_columnwise_in_backward`` takes it."""
    plan, dtype, sources = call
    format = plan.recipe.wgrad.b
    if format is None:
        (x,) = saved
        return x.dequantize().t() if isinstance(x, Float8Tensor) else x.t()
    if kept.how == FLOAT8:
        return Operand.of(format, *saved)
    if kept.how == RECOMPUTE:
        rowwise = Operand.of(present(plan.recipe.fprop.a), *saved)
        return derive_columnwise_in_backward(rowwise, format, after, plan.any_layout)
    x, *scales = saved
    matrix = (x if x.dim() == 2 else x.reshape(-1, x.shape[-1])).to(dtype)
    source: ScaleSource = sources.x
    prior = source.prior()
    if prior is not None:
        scale = scales[0]
        if torch.compiler.is_compiling():
            # Else it is the same cast as forward's, whose codes a partitioner saves.
            scale = copy_after(scale, after)
        given = PriorScale(scale, prior.margin, covers=False, is_known=kept.is_known)
        source = GivenScale(given, source.reduce)
    return present(quantize(matrix, None, format, source, plan.any_layout).columnwise)


def present(operand: Present | None) -> Present:
    """What the recipe says is there."""
    if operand is None:
        raise RuntimeError("a float8 tensor lacks the operand that its recipe reads")
    return operand


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


def cast_or_share(x: torch.Tensor, matrix: torch.Tensor, formats: Formats, call: Call) -> Quantized:
    """Both operands of ``matrix``, or those of an earlier sibling that was given the same ``x``.

    ``matrix`` is ``x`` as it is quantized, (M, K). Each sibling's source keeps the amax.
    """
    plan, _, sources = call
    source, any_layout = sources.x, plan.any_layout
    scope: _Scope | None = None
    # Nobody counts all writes to the local tensor of a distributed x.
    if not (torch.compiler.is_compiling() or sources.distributed or not _scopes.stack or x.is_inference()):
        innermost = _scopes.stack[-1]
        scope = innermost if innermost.hook is saved_tensors_hook() else None
    if scope is None:
        made = quantize(matrix, *formats, source, any_layout)
        event = None if torch.compiler.is_compiling() else next(_events)
    else:
        storage = x.untyped_storage()
        place = x._version, storage._cdata, int(x.storage_offset()), x.stride()
        key = place, matrix.dtype, formats, any_layout, source.key
        if scope.x is None or scope.x() is not x or scope.key != key:
            scope.made, scope.event = quantize(matrix, *formats, source, any_layout), next(_events)
            # A weak reference keeps the storage's address, so that none that x gets later has it.
            scope.storage = StorageWeakRef(storage)
            scope.x, scope.key = weakref.ref(x), key
        made, event = scope.made, scope.event
    if made.amax is not None:
        source.keep(made.amax, event)
    return made
