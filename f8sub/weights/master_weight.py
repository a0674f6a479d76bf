"""MasterWeight: a high-precision weight that knows when it was changed.

Codes are cast from it once and used until it changes. Version counters cannot tell when that is (foreach and fused
AdamW and ``dcp.load`` bump none), so every operator that writes to it, through any view, marks one cell that all its
views share.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from typing_extensions import override

from f8sub.formats import Float8Format, Operand
from f8sub.kernels.quantize import quantize
from f8sub.kernels.scales import CURRENT, LayerSource, ScaleSource
from f8sub.tensor.operators import Operator, describe
from f8sub.torch_compat import is_capturing, tensors_in_storage
from f8sub.weights.record import Cell, State, WeightRecord
from f8sub.weights.weight import Weight, local_tensor

aten = torch.ops.aten
c10d = torch.ops.c10d

_COPIES = {
    aten._pin_memory.default,
    aten._to_copy.default,
    aten.clone.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
}
"""Operators whose result is a master weight of its own: what FSDP2, DTensor and ``nn.Module`` re-make weights with."""

_COPIES_OF_OTHERS = {"spmd_types::replicate_to_varying"}
"""Likewise, of libraries that need not be installed: what torchtitan cuts weights for tensor parallelism with."""

_COLLECTIVES = {getattr(c10d, name).default for name in ("scatter_", "broadcast_") if hasattr(c10d, name)}
"""In-place collectives of ``distribute_tensor``: the result holds the tensors they wrote to."""


Self = TypeVar("Self", bound="MasterWeight")


class MasterWeight(Weight):
    """A weight in high precision, sharded or whole, that pickles, checkpoints and computes as the tensor it is.

    Storage-backed: checkpointers and safetensors find a real storage behind it. Any operator runs on the plain
    tensor and returns plain tensors, except the views and copies that sharding APIs re-make weights with.
    While ``torch.compile`` traces it is a wrapper around the traced tensor instead.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    OWN_ATTRIBUTES: ClassVar = frozenset({"cell", "_traced", "_alias", "copies_plainly"})
    """What an instance holds besides the attributes that users set on their parameters."""

    copies_plainly: bool = False
    """Whether copies are plain tensors: of views that a sharded model's state dict holds, and of views of those."""

    cell: Cell
    _traced: torch.Tensor | None
    _alias: tuple[tuple[Any, ...], torch.Tensor] | None

    @staticmethod
    def __new__(cls: type[Self], data: torch.Tensor, cell: Cell | None = None) -> Self:
        """Share ``data``'s storage; a view of a master weight gives its ``cell`` too."""
        self: Self
        if type(data) is torch.Tensor:
            self = torch.Tensor._make_subclass(cls, data, data.requires_grad)
            self._traced = self._alias = None
            self.cell = cell or Cell(StorageWeakRef(self.untyped_storage()))
            return self
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=data.device,
            requires_grad=data.requires_grad,
        )
        self._traced = data
        self.cell = cell or Cell(None)
        return self

    def __init__(self, data: torch.Tensor, cell: Cell | None = None) -> None:
        super().__init__()

    @property
    @override
    def record(self) -> WeightRecord | None:
        return self.cell.record

    @property
    @override
    def master(self) -> "MasterWeight":
        return self

    @property
    def plain(self) -> torch.Tensor:
        """The same storage as an ordinary tensor. Made anew each time: none is kept past ``p.data = t``."""
        if self._traced is not None:
            return self._traced
        with torch._C._DisableTorchDispatch():
            return torch.Tensor.detach(self)

    def numpy(self, *, force: bool = False) -> Any:
        """As of any tensor; what is written to the array is not seen."""
        return self.plain.numpy(force=force)

    def tolist(self) -> Any:
        """As of any tensor."""
        return self.plain.tolist()

    @property
    def exported(self) -> torch.Tensor:
        """``plain``, for others to keep. For as long as they do no codes are, because who writes to it is not seen."""
        self.cell.shared = True
        return self.plain

    def exported_as(self, parameter: torch.Tensor) -> torch.Tensor:
        """What a state dict holds of ``parameter``, whose local tensor this is: in the same memory, without a graph.

        The local tensor of a DTensor keeps its class: DTensor's in-place operators on lists count no version of it.
        """
        if parameter is self:
            return self.exported
        found = parameter.detach()
        local_tensor(found).copies_plainly = True  # type: ignore[attr-defined]
        return found

    @property
    def state(self) -> State:
        """Another value in every other storage, and after every change.

        Eager operators mark the cell, compiled code bumps the version only.
        """
        cell = self.cell
        return cell.number, cell.epoch, 0 if self.is_inference() else self._version

    @property
    def owns_storage(self) -> bool:
        """False where plain tensors may write to the storage unseen, so that nothing is cached.

        After ``p.data = t``, and while a state dict's tensors or any view of them are there. When they are gone the
        weight counts as changed, once.
        """
        storage = self.cell.storage
        if storage is None or self.untyped_storage()._cdata != storage.cdata:
            return False
        if self.cell.shared:
            if tensors_in_storage(self) > 1 + (self._alias is not None):
                return False
            self.cell.shared = False
            self.mark_stale()
        return True

    def mark_stale(self) -> None:
        """Say that the weight changes now; of itself, where no operator of its own shows it (compiled optimizers)."""
        self.cell.epoch += 1
        if is_capturing(self):
            self.cell.replayed = True

    @property
    def _inner(self) -> torch.Tensor:
        """The traced tensor or, as a graph input, an alias with a StorageImpl of its own.

        torch.compile refuses a subclass whose inner tensor shares the outer one's StorageImpl, and guards on the
        alias's identity, so it is kept for as long as the storage it was made from is the weight's.
        """
        if self._traced is not None:
            return self._traced
        made_from = (self.untyped_storage()._cdata, int(self.storage_offset()), self.shape, self.stride())
        if self._alias is None or self._alias[0] != made_from:
            self._alias = made_from, torch._C._from_dlpack(torch._C._to_dlpack(self.plain))
        return self._alias[1]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_inner"], None

    @classmethod
    def __tensor_unflatten__(
        cls,
        inner: dict[str, torch.Tensor],
        context: None,
        outer_size: Sequence[int],
        outer_stride: Sequence[int],
    ) -> "MasterWeight":
        return cls(inner["_inner"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.plain
        if isinstance(self, torch.nn.Parameter):
            return torch.nn.Parameter(plain, self.requires_grad).__reduce_ex__(protocol)
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        copy: Any = self.plain.clone() if self.copies_plainly else type(self)(self.plain.clone())
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        if self.grad is not None:
            copy.grad = self.grad.__deepcopy__(memo)
        memo[id(self)] = copy
        return copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.plain!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Mark what is written to, run on plain tensors, and keep the class where a weight is re-made."""
        kwargs = kwargs or {}
        op, wrap = _HANDLINGS.get(id(func)) or _handling_of(func)
        for position, name in op.written:
            value = args[position] if position < len(args) else kwargs.get(name)
            if isinstance(value, MasterWeight):
                value.mark_stale()
            elif isinstance(value, (list, tuple)):
                for tensor in pytree.tree_leaves(value):
                    if isinstance(tensor, MasterWeight):
                        tensor.mark_stale()
        first = args[0] if args else None
        if len(types) == 1 and isinstance(first, MasterWeight):
            plainly = first._traced is None
        else:
            plainly = all(issubclass(t, MasterWeight) for t in types) and not _any_traced(args, kwargs)
        if plainly:
            with torch._C._DisableTorchDispatch():
                out = func(*args, **kwargs)
        else:
            plain_args, plain_kwargs = pytree.tree_map_only(MasterWeight, lambda t: t.plain, (args, kwargs))
            out = func(*plain_args, **plain_kwargs)
        return out if wrap is None else wrap(args, kwargs, out)


def _wrap_views(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """A view shares the storage, and so the cell: what is written through it is seen."""
    source: MasterWeight = args[0]
    views = [type(source)(view, source.cell) for view in (out if isinstance(out, (list, tuple)) else [out])]
    if source.copies_plainly:
        for view in views:
            view.copies_plainly = True
    return views if isinstance(out, (list, tuple)) else views[0]


def _wrap_copy(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    if args[0].copies_plainly:
        return out
    copy = type(args[0])(out)
    copy.cell.record = args[0].cell.record
    return copy


def _note_copy(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    target, source = args[:2]
    if isinstance(target, MasterWeight) and isinstance(source, MasterWeight):
        target.cell.mark_copy_of(source.cell, target.shape)
    return out


def _wrap_collective(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    kind = next(type(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, MasterWeight))
    return pytree.tree_map_only(torch.Tensor, lambda t: t if isinstance(t, MasterWeight) else kind(t), out)


class _Handling(NamedTuple):
    """How an operator is run.

    Attributes:
        operator: what it does.
        wrap: makes the result of (args, kwargs, plain result); None where that is the plain result.
    """

    operator: Operator
    wrap: Callable[[tuple[Any, ...], dict[str, Any], Any], Any] | None


_WRAPS = {
    **dict.fromkeys(_COPIES, _wrap_copy),
    **dict.fromkeys(_COLLECTIVES, _wrap_collective),
    aten.copy_.default: _note_copy,
}

_HANDLINGS: dict[int, _Handling] = {}
"""By identity of the operator, which ``describe`` keeps alive."""


def _handling_of(func: Any) -> _Handling:
    op = describe(func)
    wrap = _WRAPS.get(func) or (_wrap_views if op.is_view else None)
    if func._schema.name in _COPIES_OF_OTHERS:
        wrap = _wrap_copy
    _HANDLINGS[id(func)] = _Handling(op, wrap)
    return _HANDLINGS[id(func)]


def rowwise_of(
    weight: MasterWeight,
    format: Float8Format,
    dtype: torch.dtype,
    source: LayerSource = CURRENT,
    through: torch.dtype | None = None,
) -> Operand:
    """A master weight's rowwise operand, cast once and kept until the weight changes.

    A function, not a method: torch.compile takes a method of a tensor for an operator.

    Args:
        weight: (N, K), not sharded.
        format: format of the codes.
        dtype: the weight is rounded to it first, as FSDP2's ``param_dtype`` or autocast would.
        source: of the scale.
        through: the weight is rounded to this before that; the dtype that it has in the model, where that is another.
    """
    if torch.compiler.is_compiling():
        return quantize_rowwise((weight if through is None else weight.to(through)).to(dtype), format, source)
    cell = weight.cell
    # A CUDA graph that recorded no cast would read these codes after every later step; and so would eager code
    # beside a graph that recorded the step.
    owned = weight.owns_storage and not (cell.replayed or is_capturing(weight))
    # Views share the cell: a transposed weight, or some of its rows, has other codes.
    place = weight.shape, weight.stride(), weight.storage_offset()
    key = weight.state, place, format, dtype, source.generation
    if owned and cell.cast is not None and cell.cast[0] == key:
        return cell.cast[1]
    if torch.is_inference_mode_enabled():
        # The cast outlives this forward, and a later backward cannot save inference tensors.
        with torch.inference_mode(mode=False):
            operand = quantize_rowwise(_rounded(weight, through, dtype), format, source)
    else:
        operand = quantize_rowwise(_rounded(weight, through, dtype), format, source)
    # Under FakeTensorMode the codes of a real weight are fake, and must not outlive the mode.
    cell.cast = (key, operand) if owned and type(operand.data) is torch.Tensor else None
    return operand


def last_cast(weight: MasterWeight, format: Float8Format | None, dtype: torch.dtype) -> Operand | None:
    """What ``rowwise_of`` returned last and keeps, if it was asked for that; None in compiled code."""
    if torch.compiler.is_compiling() or weight.cell.cast is None:
        return None
    (*_, kept_format, kept_dtype, _), operand = weight.cell.cast
    return operand if kept_format is format and kept_dtype is dtype else None


def _rounded(weight: MasterWeight, through: torch.dtype | None, dtype: torch.dtype) -> torch.Tensor:
    values = weight.plain if through is None else weight.plain.to(through)
    return values if values.dtype is dtype else values.to(dtype)


def quantize_rowwise(weight: torch.Tensor, format: Float8Format, source: ScaleSource = CURRENT) -> Operand:
    """A high-precision weight's rowwise operand; see ``rowwise_of``."""
    operand = quantize(weight, format, None, source).rowwise
    if operand is None:
        raise RuntimeError("quantize returned no rowwise operand for a rowwise format")
    return operand


def _any_traced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch.compile is tracing the call; then every master weight in it is a traced one."""
    weights = (t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, MasterWeight))
    return any(weight._traced is not None for weight in weights)
