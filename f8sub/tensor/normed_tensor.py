"""Layer 3. NormedTensor: what an RMSNorm returns whose readers cast it, measured and not yet made.

It holds the norm's input, weight and rstd. Who casts it gets codes of one kernel that normalizes and casts; whatever
else is done to it is done to the normalized matrix in high precision, which is made then, once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

from f8sub import backends
from f8sub.formats import Float8Format, Operand
from f8sub.kernels import normed, producer_ops
from f8sub.kernels.delayed import PastScale
from f8sub.kernels.normed import Measured
from f8sub.kernels.norms import Norm, by_torch, normalize

aten = torch.ops.aten

_SAME_ROWS = (aten.detach.default, aten.alias.default, aten.view.default, aten._unsafe_view.default)

_PARTS = ("source", "weight", *Measured._fields)


@dataclass(slots=True)
class Made:
    """What the aliases of one norm's result share in eager code.

    Attributes:
        version: of the source, which it is a value of.
        matrix: in high precision, of the source's shape, once somebody read that; else None.
    """

    version: int
    matrix: torch.Tensor | None = None


class NormedTensor(torch.Tensor):
    """A normalized matrix, (..., N), not yet made.

    Attributes:
        source: the norm's input, of which it is a value: whoever writes to that before this is read is told so.
        weight: (N,), of its dtype.
        rstd: float32, (rows, 1).
        whole_amax: that of ``Measured``.
        eps: the norm's.
        rounds: likewise.
        made: None while ``torch.compile`` traces, which merges what is made twice.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    source: torch.Tensor
    weight: torch.Tensor
    rstd: torch.Tensor
    whole_amax: torch.Tensor | None
    eps: float
    rounds: bool
    made: Made | None = None

    @staticmethod
    def __new__(
        cls: type["NormedTensor"],
        source: torch.Tensor,
        weight: torch.Tensor,
        measured: Sequence[torch.Tensor | None],
        norm: tuple[float, bool],
        shape: Sequence[int] | None = None,
    ) -> "NormedTensor":
        """Of the source's shape, or of another one with as many rows."""
        self: NormedTensor = torch.Tensor._make_wrapper_subclass(
            cls, source.shape if shape is None else shape, dtype=source.dtype, device=source.device
        )
        self.source, self.weight = source, weight
        for name, value in zip(Measured._fields, measured, strict=True):
            setattr(self, name, value)
        self.eps, self.rounds = norm
        return self

    def __init__(
        self,
        source: torch.Tensor,
        weight: torch.Tensor,
        measured: Sequence[torch.Tensor | None],
        norm: tuple[float, bool],
        shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__()

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [name for name in _PARTS if getattr(self, name) is not None], (self.eps, self.rounds)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> "NormedTensor":
        measured = [inner.get(name) for name in Measured._fields]
        return NormedTensor(inner["source"], inner["weight"], measured, context, outer_size)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"NormedTensor({tuple(self.shape)}, eps={self.eps}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The operator of what is normalized; detached and seen with other leading dims it stays as it is."""
        kwargs = kwargs or {}
        if func in _SAME_ROWS:
            shape = None
            if len(args) > 1:
                shape = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta").view(args[1]).shape
            if shape is None or shape[-1:] == args[0].shape[-1:]:
                return return_and_correct_aliasing(func, args, kwargs, _alias(args[0], shape))
        if func._schema.is_mutable:
            given = zip(func._schema.arguments, args, strict=False)
            if any(isinstance(value, NormedTensor) and _is_written(argument) for argument, value in given):
                raise NotImplementedError(
                    f"{func} writes to the result of a fused norm, which is not in memory; write to a clone of it, or "
                    "leave the norm out of f8sub.fuse_producers"
                )
        return func(*pytree.tree_map(_value, args), **pytree.tree_map(_value, kwargs))


def high_precision(x: NormedTensor) -> torch.Tensor:
    """What it stands for, of its shape, below autograd: in eager code what the module makes, rstd and all."""
    made = None if torch.compiler.is_compiling() else x.made
    if made is None:
        rstd = x.rstd.view(*x.source.shape[:-1], 1)
        return normalize(x.source, x.weight, Norm(x.eps, x.rounds), rstd).view(x.shape)
    if made.matrix is None:
        _check_source(x, made)
        made.matrix = by_torch(x.source, x.weight, Norm(x.eps, x.rounds))
    return made.matrix.view(x.shape)


def plain(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix, or a NormedTensor's rows as one, (rows, N)."""
    if not isinstance(matrix, NormedTensor):
        return matrix
    return high_precision(matrix).reshape(-1, matrix.shape[-1])


def quantize(
    matrix: torch.Tensor,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    any_layout: bool = False,
) -> tuple[Operand | None, Operand | None]:
    """``backends.quantize`` of a matrix, or of a NormedTensor's rows."""
    if not isinstance(matrix, NormedTensor):
        return backends.quantize(matrix, rowwise, columnwise, any_layout)
    usages = rowwise, columnwise
    if normed.why_no_kernel(usages) is None:
        rows = matrix.source.reshape(-1, matrix.shape[-1])
        norm, measured = Norm(matrix.eps, matrix.rounds), _measured(matrix)
        if torch.compiler.is_compiling():
            return producer_ops.quantize_normed(rows, matrix.weight, norm, measured, usages)
        if _takes(matrix, rows, any_layout):
            return normed.quantize(rows, matrix.weight, norm, measured, usages)[:2]
    return backends.quantize(plain(matrix), rowwise, columnwise, any_layout)


def quantize_delayed(
    matrix: torch.Tensor,
    past: PastScale,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    any_layout: bool = False,
) -> tuple[Operand | None, Operand | None, torch.Tensor]:
    """``backends.quantize_delayed`` likewise, in eager code."""
    usages = rowwise, columnwise
    if isinstance(matrix, NormedTensor) and normed.why_no_kernel(usages) is None:
        rows = matrix.source.reshape(-1, matrix.shape[-1])
        if _takes(matrix, rows, any_layout):
            norm = Norm(matrix.eps, matrix.rounds)
            row, col, largest = normed.quantize(rows, matrix.weight, norm, _measured(matrix), usages, past)
            if largest is not None:
                return row, col, largest
    return backends.quantize_delayed(plain(matrix), past, rowwise, columnwise, any_layout)


def _measured(x: NormedTensor) -> Measured:
    return Measured(x.rstd, x.whole_amax)


def _takes(x: NormedTensor, rows: torch.Tensor, any_layout: bool) -> bool:
    """Whether kernels cast it, in eager code, and not what by then was made in high precision."""
    if any_layout or not normed.takes(rows, x.weight):
        return False
    if x.made is not None:
        _check_source(x, x.made)
    return True


def _alias(x: NormedTensor, shape: Sequence[int] | None) -> NormedTensor:
    norm = x.eps, x.rounds
    alias = NormedTensor(x.source, x.weight, _measured(x), norm, x.shape if shape is None else shape)
    alias.made = x.made
    return alias


def _value(value: Any) -> Any:
    return high_precision(value) if isinstance(value, NormedTensor) else value


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _check_source(x: NormedTensor, made: Made) -> None:
    if x.source._version != made.version:
        raise RuntimeError(
            "the input of a fused norm was written to before its result was read; write to a clone of it, or leave the "
            "norm out of f8sub.fuse_producers"
        )
