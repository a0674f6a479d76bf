"""MasterWeight: a high-precision weight that knows when it was changed.

Codes are cast from it once and used until it changes. Version counters cannot tell when: foreach and fused AdamW and
``dcp.load`` bump none. So every operator that writes to it marks a cell that all views of the storage share.

The rowwise operand of a weight that is not gathered as float8 is cast once, too, and kept until the weight changes.
"""

import contextlib
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from f8sub.capture import is_capturing
from f8sub.formats import Float8Format, Operand, present
from f8sub.kernels.quantize import quantize
from f8sub.kernels.scales import CURRENT, LayerSource, ScaleSource
from f8sub.tensor.op_schema import Operator, describe
from f8sub.torch_compat import (
    PlainToDynamo,
    is_dtensor,
    no_torch_dispatch,
    no_torch_function,
    no_torch_function_of_subclasses,
    tensors_in_storage,
    tree_leaves,
    tree_map_only,
)
from f8sub.weights.weight import Weight, WeightRecord, is_raw, local_tensor, take_place, written_raw

State = tuple[int, int, int]
"""Which storage a weight lies in, and what was written to it, see ``MasterWeight.state``."""

_numbers = itertools.count(1)


class Cell:
    """Holds what all views of one storage share.

    Attributes:
        number: unique in this process. FSDP2 gives a weight new storages, whose epochs may equal the old one's.
        epoch: number of operators that wrote to the storage.
        storage: held weakly, so that its address cannot become another one's. ``p.data = t`` replaces a weight's.
        cast: the last cast and the key of what it was cast from, see ``rowwise_of``.
        record: of the weight, or of one of those that are tied; None where it is no module's.
        replayed: whether a CUDA graph recorded an operator that writes to the storage: its replays change it unseen.
        copied: what ``copies`` compares.
        shared: whether plain tensors may lie in the storage, such as a state dict's: writes to those are not seen.
    """

    __slots__ = "__weakref__", "cast", "copied", "epoch", "number", "record", "replayed", "shared", "storage"

    def __init__(self, storage: StorageWeakRef | None) -> None:
        self.number, self.epoch = next(_numbers), 0
        self.storage = storage
        self.cast: tuple[tuple[Any, ...], Operand] | None = None
        self.record: WeightRecord | None = None
        self.replayed = self.shared = False
        self.copied: tuple[Cell, int, int, torch.Size] | None = None

    @property
    def is_trained(self) -> bool:
        """True if its parameter takes gradients."""
        weight = None if self.record is None else self.record.parameter
        return weight is not None and weight.requires_grad

    def __deepcopy__(self, memo: dict[int, Any]) -> "Cell":
        """Return a cell of no storage: torch's asynchronous checkpointing copies a tensor's attributes alone."""
        return Cell(None)

    def take(self, record: WeightRecord) -> None:
        """Belong to a copied module, unless the present one is alive: a shallow copy of a module shares the weight."""
        if self.record is None or self.record.module is None:
            self.record = record

    def copies(self, source: "Cell", shape: torch.Size) -> bool:
        """Return whether a view of ``shape`` was copied from ``source`` and neither storage changed since."""
        return self.copied == (source, source.epoch, self.epoch, shape)


Self = TypeVar("Self", bound="MasterWeight")


class MasterWeight(Weight, metaclass=PlainToDynamo):
    """A weight in high precision, sharded or whole, that pickles, checkpoints and computes as the tensor it is.

    Checkpointers find a real storage behind it. Operators return plain tensors, except the views and copies that
    sharding APIs re-make weights with. ``torch.compile`` traces a plain tensor in its place, and compiled code is
    handed the weight itself: unwrapping took the host longer than a check of all guards.
    """

    __torch_function__ = no_torch_function

    OWN_ATTRIBUTES: ClassVar = frozenset({"cell", "_wrapped", "_alias", "copies_plainly"})
    """What an instance holds besides the attributes that users set on their parameters."""

    copies_plainly: bool = False
    """Whether copies are plain tensors: of views that a sharded model's state dict holds, and of views of those."""

    cell: Cell
    _wrapped: torch.Tensor | None
    _alias: tuple[tuple[Any, ...], torch.Tensor] | None = None

    @staticmethod
    def __new__(
        cls: type[Self], data: torch.Tensor, cell: Cell | None = None, *, requires_grad: bool | None = None
    ) -> Self:
        """Share ``data``'s storage; a view of a master weight gives its ``cell`` too.

        With ``requires_grad`` it is a parameter: accelerate moves parameters by ``type(p)(values, requires_grad=...)``.
        """
        self: Self
        if requires_grad is not None:
            values = data.plain if isinstance(data, MasterWeight) else data.detach()
            return torch.nn.Parameter(cls(values), requires_grad)  # type: ignore[return-value]
        if type(data) is torch.Tensor:
            self = torch.Tensor._make_subclass(cls, data, data.requires_grad)
            self._wrapped = None
            self.cell = cell or Cell(StorageWeakRef(self.untyped_storage()))
            return self
        # What has no storage, as a fake tensor, is wrapped.
        wrapper: Any = TraceableMasterWeight
        self = torch.Tensor._make_wrapper_subclass(
            wrapper,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=data.device,
            requires_grad=data.requires_grad,
        )
        self._wrapped = data
        self.cell = cell or Cell(None)
        return self

    def __init__(
        self, data: torch.Tensor, cell: Cell | None = None, *, requires_grad: bool | None = None
    ) -> None:
        super().__init__()

    @staticmethod
    def of(data: torch.Tensor) -> "MasterWeight":
        """Return a weight that shares ``data``'s storage: a layer's, (N, K), or all experts'."""
        return (MasterWeight if data.dim() <= 2 else TraceableMasterWeight)(data)

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
        """The same storage as an ordinary tensor, created at each call: none is kept past ``p.data = t``."""
        if self._wrapped is not None:
            return self._wrapped
        with no_torch_dispatch():
            return torch.Tensor.detach(self)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as a NumPy array in the same memory; writes to the array are not seen."""
        return self.plain.numpy(force=force)

    def tolist(self) -> Any:  # noqa: D102
        return self.plain.tolist()

    @property
    def exported(self) -> torch.Tensor:
        """``plain``, for others to keep; until they let it go no codes are kept, because they may write to it."""
        self.cell.shared = True
        return self.plain

    @override
    def exported_as(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter is self:
            return self.exported
        # Its local tensor keeps the class: DTensor's in-place operators on lists count no version.
        found = parameter.detach()
        local_tensor(found).copies_plainly = True  # type: ignore[attr-defined]
        return found

    @property
    def state(self) -> State:
        """A value that differs in every other storage, and after every change."""
        cell = self.cell  # which eager operators mark; compiled code bumps the version only
        return cell.number, cell.epoch, 0 if self.is_inference() else self._version

    @property
    def owns_storage(self) -> bool:
        """False where others may write unseen: after ``p.data = t``, while a state dict has views, in shared memory.

        Nothing is cached then. When a state dict's views are gone the weight counts as changed, once.
        """
        storage, memory = self.cell.storage, self.untyped_storage()
        if storage is None or memory._cdata != storage.cdata or (self.is_cpu and memory.is_shared()):
            return False
        if self.cell.shared:
            # This tensor itself is one, and an alias for torch.compile another: any
            # further one is somebody else's view.
            if tensors_in_storage(self) > 1 + (self._alias is not None):
                return False
            self.cell.shared = False
            self.mark_stale()
        return True

    def take_cell(self, other: torch.Tensor | None) -> None:
        """Share the cell of ``other`` if ``self.data = other`` put this weight where that lies; no operator tells."""
        storage = other.cell.storage if isinstance(other, MasterWeight) else None
        if storage is not None and self.untyped_storage()._cdata == storage.cdata:
            self.cell = cast(MasterWeight, other).cell

    def mark_stale(self) -> None:
        """Note that the weight changes now; for writes that no operator of its own shows, as in compiled steps."""
        self.cell.epoch += 1
        if is_capturing(self):
            # Python runs once, at capture: replays write to the storage and call nothing here.
            self.cell.replayed = True

    @property
    def _inner(self) -> torch.Tensor:
        """The traced tensor or, as a graph input, an alias with a StorageImpl of its own, as torch.compile demands.

        Of all weights, because code that AOTAutograd kept on disk may be of a version that had it look into each.

        It guards on the alias's identity, so that is kept for as long as it lies where the weight does. The address
        shows that, which no other memory gets while the alias holds this one; each call of compiled code asks twice.
        """
        if self._wrapped is not None:
            return self._wrapped
        made_from = self.data_ptr(), self.stride(), self.shape
        if self._alias is None or self._alias[0] != made_from:
            # Of the whole storage, because fake tensors compare offsets, and DLPack's tensors have none.
            whole = self.plain.new_empty(0).set_(self.untyped_storage())
            dlpack: Any = torch.utils.dlpack
            memory = dlpack.from_dlpack(dlpack.to_dlpack(whole)).untyped_storage()
            place = int(self.storage_offset()), self.shape, self.stride()
            self._alias = made_from, whole.new_empty(0).set_(memory, *place)
        return self._alias[1]

    @classmethod
    def __tensor_unflatten__(
        cls,
        inner: dict[str, torch.Tensor],
        context: None,
        outer_size: Sequence[int],
        outer_stride: Sequence[int],
    ) -> "MasterWeight":
        return cls(inner["_inner"])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            # Modules that are tied get one copy, and so stay tied.
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
        # This runs for every operator on every weight of every step, so what an operator
        # does is looked up by identity.
        op, wrap, takes_values = _HANDLINGS.get(id(func)) or _handling_of(func)
        if takes_values:
            _refuse_raw(*args[:2])
        # Before the operator runs: one that fails halfway wrote, too.
        for position, name in op.written:
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in tree_leaves(value) if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, MasterWeight):
                    tensor.mark_stale()
        first = args[0] if args else None
        # The usual case, a weight alone: no walk over the arguments.
        if len(types) == 1 and isinstance(first, MasterWeight):
            plainly = first._wrapped is None
        else:
            plainly = all(issubclass(t, MasterWeight) for t in types) and not any(
                isinstance(t, MasterWeight) and t._wrapped is not None for t in tree_leaves((args, kwargs))
            )
        if plainly:
            with no_torch_dispatch():
                # Below dispatch a MasterWeight is an ordinary tensor of its storage, so nothing has to be unwrapped.
                out = func(*args, **kwargs)
        else:
            plain_args, plain_kwargs = tree_map_only(MasterWeight, lambda t: t.plain, (args, kwargs))
            out = func(*plain_args, **plain_kwargs)
        return out if wrap is None else wrap(args, kwargs, out)


def mark_stale_by_replays(weights: Sequence[MasterWeight]) -> None:
    """Note that many weights change now, and that each replay of the graph in question is followed by this call."""
    for weight in weights:  # without a call for each
        weight.cell.epoch += 1


Mark = tuple[int, int, int, int | None]
"""A weight's ``state``, and the storage that it lies in; None where others may write to some weight unseen."""

_version_of = operator.attrgetter("_version")


def marks_of(weights: Sequence[MasterWeight], *, as_owned: bool = False) -> list[Mark]:
    """Return a mark of each of many weights that learn, in a fifth of the time that their states take.

    Args:
        weights: on GPUs. Of weights in shared memory on the host this does not see what other processes write.
        as_owned: return marks that a later call has to return where nothing wrote to a weight and it owns its storage.
    """
    cells = [weight.cell for weight in weights]
    memory: list[int | None]
    with no_torch_function_of_subclasses():
        if as_owned:
            memory = [0 if cell.storage is None else cell.storage.cdata for cell in cells]
        elif True in [cell.shared or cell.replayed for cell in cells]:
            memory = [None] * len(cells)
        else:
            memory = [weight.untyped_storage()._cdata for weight in weights]
        numbers, epochs = [cell.number for cell in cells], [cell.epoch for cell in cells]
        return list(zip(numbers, epochs, map(_version_of, weights), memory, strict=True))


class TraceableMasterWeight(MasterWeight):  # type: ignore[metaclass]
    """All experts' weights, and what wraps a tensor without storage: traced as what it is.

    ``grouped_linear`` is given views of the weights, and finds their module by what dynamo knows of those.
    """

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_inner"], None


def _wrap_views(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """Give views of a weight its class and its cell, so that what is written through them is seen."""
    source: MasterWeight = args[0]
    views = out if isinstance(out, (list, tuple)) else [out]
    # ``to`` may return its argument.
    views = [view if isinstance(view, MasterWeight) else type(source)(view, source.cell) for view in views]
    if source.copies_plainly:
        for view in views:
            view.copies_plainly = True
    return views if isinstance(out, (list, tuple)) else views[0]


def _wrap_copy(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    if args[0].copies_plainly:
        return out
    # Another storage, and so a cell of its own; it is the same weight to its module.
    copy = type(args[0])(out)
    copy.cell.record = args[0].cell.record
    return copy


def _refuse_raw(target: Any, source: Any) -> None:
    """Refuse codes as the values of a weight, or of a list of them; a view of a weight as bytes takes bytes."""
    pairs = zip(target, source, strict=False) if isinstance(target, (list, tuple)) else [(target, source)]
    for weight, values in pairs:
        if isinstance(weight, MasterWeight) and is_raw(values) and not is_raw(weight):
            raise written_raw("a layer" if weight.record is None else weight.record.fqn, values.dtype)


def _note_copy(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    target, source = args[:2]
    if isinstance(target, MasterWeight) and isinstance(source, MasterWeight):
        # Fresh scales stay valid for a copy: FSDP2 copies a short shard into a padded one on that rank alone.
        target.cell.copied = source.cell, source.cell.epoch, target.cell.epoch, target.shape
    return out


def _wrap_collective(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """Give the result of an in-place collective the class of the tensors that it wrote to."""
    kind = next(type(t) for t in tree_leaves((args, kwargs)) if isinstance(t, MasterWeight))
    return tree_map_only(torch.Tensor, lambda t: t if isinstance(t, MasterWeight) else kind(t), out)


def _count_versions(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """Have autograd see writes to a list, as it does those to a list of plain tensors."""
    masters = [t for t in args[0] if isinstance(t, MasterWeight) and not t.is_inference()]
    torch.autograd.graph.increment_version(masters)
    return out


_Wrap = Callable[[tuple[Any, ...], dict[str, Any], Any], Any]
"""Makes an operator's result of its arguments and its plain result."""

_WRAPS: dict[str, _Wrap] = {
    # What FSDP2, DTensor and nn.Module re-make weights with; and torchtitan, for tensor parallelism.
    **dict.fromkeys(("aten::_pin_memory", "aten::_to_copy", "aten::clone"), _wrap_copy),
    **dict.fromkeys(("aten::empty_like", "aten::new_empty", "aten::new_zeros"), _wrap_copy),
    "spmd_types::replicate_to_varying": _wrap_copy,
    # In-place collectives of distribute_tensor.
    **dict.fromkeys(("c10d::scatter_", "c10d::broadcast_"), _wrap_collective),
    "aten::copy_": _note_copy,
}

_TAKE_VALUES = {"aten::copy_", "aten::_foreach_copy_"}
"""Operators that write another tensor's values whatever dtype it has."""

_HANDLINGS: dict[int, tuple[Operator, _Wrap | None, bool]] = {}
"""What an operator does, its wrap, if any, and whether it is one of ``_TAKE_VALUES``.

By identity of the operator, which ``describe`` keeps alive.
"""


def _handling_of(func: Any) -> tuple[Operator, _Wrap | None, bool]:
    op, name = describe(func), func.name()
    wrap = _count_versions if op.written and name.startswith("aten::_foreach") else _WRAPS.get(name)
    _HANDLINGS[id(func)] = op, wrap or (_wrap_views if op.is_view else None), name in _TAKE_VALUES
    return _HANDLINGS[id(func)]


def master_parameter(weight: torch.nn.Parameter, record: WeightRecord) -> torch.nn.Parameter:
    """Make a parameter a master weight, and return it: the same object, which tied modules have, where torch can."""
    master = MasterWeight.of(weight.detach())
    master.cell.record = record
    made = torch.nn.Parameter(master, weight.requires_grad)
    return weight if take_place(made, weight) else made


def reassigned(record: WeightRecord, before: torch.Tensor, kind: type[torch.Tensor]) -> None:
    """Restore the class of a module's weight after ``load_state_dict(assign=True)`` put another tensor in its place.

    Args:
        record: of the weight.
        before: the parameter that the module had.
        kind: the class of its local tensor then; after loading it is another, where torch swaps the two.
    """
    weight = record.module._parameters[record.name]
    if issubclass(kind, MasterWeight):
        if not isinstance(local_tensor(weight), MasterWeight):
            _make_master_again(record)
    elif issubclass(kind, Weight) and weight is not before:
        # The values go to the master, which an optimizer holds.
        with torch.no_grad():
            before.copy_(weight)
        setattr(record.module, record.name, before)


def _make_master_again(record: WeightRecord) -> None:
    """Make a master weight of what ``load_state_dict(assign=True)`` put in its place."""
    weight = record.module._parameters[record.name]
    master = MasterWeight.of(local_tensor(weight).detach())
    master.cell.record = record
    if is_dtensor(weight):
        weight._local_tensor = master
    else:
        master.cell.shared = True  # by the state dict
        setattr(record.module, record.name, torch.nn.Parameter(master, weight.requires_grad))


def rowwise_of(
    weight: MasterWeight,
    format: Float8Format,
    dtype: torch.dtype,
    source: LayerSource = CURRENT,
    through: torch.dtype | None = None,
) -> Operand:
    """Return a master weight's rowwise operand, cast once and cached until the weight changes.

    A function, not a method: torch.compile takes a method of a tensor for an operator.

    Args:
        weight: (N, K), not sharded.
        format: of the quantized data.
        dtype: the weight is rounded to it first, as FSDP2's ``param_dtype`` or autocast would.
        source: of the scale.
        through: rounded to before ``dtype``: the weight's dtype in the model, where that is another.
    """
    if torch.compiler.is_compiling():
        return quantize_rowwise((weight if through is None else weight.to(through)).to(dtype), format, source)
    cell = weight.cell
    # A CUDA graph that recorded no cast would read these codes after every later step; and so would eager code
    # beside a graph that recorded the step.
    owned = weight.owns_storage and not (cell.replayed or is_capturing(weight))
    # Views share the cell: a transposed weight, or some of its rows, has other codes.
    place = weight.shape, weight.stride(), weight.storage_offset()
    # The generation, because a delayed scale becomes another one without a write to the weight.
    key = weight.state, place, format, dtype, source.generation
    if owned and cell.cast is not None and cell.cast[0] == key:
        return cell.cast[1]
    # The cast outlives this forward, and a later backward cannot save inference tensors.
    inference = torch.is_inference_mode_enabled()
    with torch.inference_mode(mode=False) if inference else contextlib.nullcontext():
        values = weight.plain if through is None else weight.plain.to(through)
        operand = quantize_rowwise(values if values.dtype is dtype else values.to(dtype), format, source)
    # Under FakeTensorMode the codes of a real weight are fake, and must not outlive the mode.
    cell.cast = (key, operand) if owned and type(operand.data) is torch.Tensor else None
    return operand


def last_cast(weight: MasterWeight, format: Float8Format | None, dtype: torch.dtype) -> Operand | None:
    """Return the cached cast of ``rowwise_of``, if it is of this format and dtype; None in compiled code."""
    if torch.compiler.is_compiling() or weight.cell.cast is None:
        return None
    (*_, kept_format, kept_dtype, _), operand = weight.cell.cast
    return operand if kept_format is format and kept_dtype is dtype else None


def quantize_rowwise(weight: torch.Tensor, format: Float8Format, source: ScaleSource = CURRENT) -> Operand:
    """Return a high-precision weight's rowwise operand; see ``rowwise_of``."""
    return present(quantize(weight, format, None, source).rowwise)
