"""PrimaryWeight: a weight that is stored as float8; its high-precision master belongs to an optimizer.

    optimizer: master weight, float32  --cast-->  model: float8 data, 1 byte per element

A model's parameter cannot be the float8 bytes alone: FSDP2, DTensor and ``nn.Module`` ask it for views, and users for
its values. So it is a handle: a shape and a dtype, no storage of its own, and one record that all its views share.

DroppedShard holds the float8 data of a sharded weight that has no high-precision values; LoadedCodes holds those of a
checkpoint until there is a shard.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch

from f8sub.errors import Float8ConfigError
from f8sub.formats import Float8Format, Operand, Tile
from f8sub.kernels import reference
from f8sub.kernels.scales import CURRENT, LayerSource, first_tile
from f8sub.tensor.op_schema import describe
from f8sub.torch_compat import (
    is_dtensor,
    no_torch_function,
    preserve_version_counter,
    tree_leaves,
    tree_map_only,
)
from f8sub.weights.master_weight import MasterWeight, rowwise_of
from f8sub.weights.shard import Shard
from f8sub.weights.weight import Weight, WeightRecord, is_of_tensors, is_raw, written_raw


class DroppedShard(Shard):
    """Keeps its float8 data, and the scales they were cast with, in place of the master."""

    _shape: torch.Size
    _kept: list[torch.Tensor]
    _codes: torch.Tensor

    @property
    def stale(self) -> bool:
        """False: nothing can change, the float8 data are the weight."""
        return False

    @property
    def is_cast_again(self) -> bool:
        """False: the float8 data keep their scales, which ``scales_written`` restores."""
        return False

    @property
    def shows_changes(self) -> bool:
        """True: there are no changes to miss."""
        return True

    @classmethod
    def of(cls, shard: Shard) -> "DroppedShard":
        """Turn ``shard`` itself into one, right after its data were gathered."""
        with torch.inference_mode(mode=False):  # a forward in inference mode may be the first after a drop
            codes = shard.cast(shard.master).to(shard.layout.device)
            dropped = cls._made_of(shard, shard.values.shape)
            dropped._codes = codes
            dropped._kept = [scales.clone() for scales in dropped._scales]
        # Empty, so that the memory of the values is freed.
        dropped.master = MasterWeight(shard.master.plain.new_empty(0, shard.layout.shape[1]))
        return dropped

    @classmethod
    def _made_of(cls, shard: Shard, shape: torch.Size) -> "DroppedShard":
        dropped = shard
        # The object stays what it is: the table, the record and what FSDP2 was handed refer to it.
        dropped.__class__ = cls
        if not isinstance(dropped, DroppedShard):
            raise RuntimeError(f"{shard.fqn}: a {type(shard).__name__} cannot hold codes alone")
        dropped._shape, dropped.copies_scales = shape, True
        return dropped

    def pending(self, source: Weight) -> torch.Tensor:
        """Return the data that were kept."""
        return self.layout.stacked(self._codes)

    def cast(self, source: Weight, *, beyond_range: float | None = None) -> torch.Tensor:
        """Return the data that were kept."""
        return self._codes

    def lay_out(self, amax: torch.Tensor, scale: torch.Tensor, scale_inv: torch.Tensor) -> None:
        """Take its entries of the table, with the scales of the codes in them from the beginning."""
        super().lay_out(amax, scale, scale_inv)
        self.copies_scales = True
        self.scales_written()

    def scales_written(self) -> None:
        """Write back the scales that the codes were cast with, over those that were just made."""
        # The table reduced an amax of 0, as the master is empty, and wrote scales of it.
        for scales, kept in zip(self._scales, self._kept, strict=bool(self._kept)):
            with preserve_version_counter(scales):
                scales.copy_(kept)
        super().scales_written()

    def dequantize(self) -> torch.Tensor:
        """Return float32 values of the float8 data, in the shard's shape."""
        rows = self._codes[: self._shape[0]]
        codes = rows[:, : self._shape[1] // self.format.codes_per_byte].view(self.format.dtype)
        if self.wire.carries_scales:
            return reference.dequantize(Operand(codes, self.wire.scales_of(rows), self.format), torch.float32)
        whole = Operand(codes, self.scales.scale_inv, self.format, self.scales.global_scale_inv)
        return _part_dequantized(whole, self._shape, self.layout.offset)

    @property
    def _scales(self) -> list[torch.Tensor]:
        scales = self.scales
        return [s for s in (scales.scale, scales.scale_inv, scales.global_scale_inv) if s is not None]


class LoadedCodes:
    """Holds a rank's part of a checkpoint's float8 data until FSDP2 asks for the weight.

    Args:
        operand: ``data`` of this rank's part, and the scales of the whole weight.
        offset: (row, column) in the whole weight at which the part begins.
    """

    def __init__(self, operand: Operand, offset: tuple[int, int]) -> None:
        self._operand, self._offset = operand, offset
        self.master = MasterWeight(operand.data.new_empty((0, operand.shape[1]), dtype=torch.float32))

    def dequantize(self) -> torch.Tensor:
        """Return float32 values of the float8 data."""
        return _part_dequantized(self._operand, torch.Size(self._operand.shape), self._offset)

    def given_to(self, shard: Shard) -> DroppedShard:
        """Turn ``shard`` itself into one that holds the data, on the device that gathers them."""
        data, scale_inv, device = self._operand.data, self._operand.scale_inv, shard.layout.device
        dropped = DroppedShard._made_of(shard, data.shape)
        wire = torch.zeros(shard.wire.padded_shape, dtype=torch.uint8, device=device)
        wire[: data.shape[0], : data.shape[1]] = data.view(torch.uint8)
        if shard.wire.carries_scales:
            of_rows = shard.wire.scales_of(wire)[: data.shape[0]]
            row, col = first_tile(shard.format.tile, self._offset)
            of_rows.copy_(scale_inv[row : row + len(of_rows), col : col + of_rows.shape[1]])
            dropped._kept = []  # the scale of NaN alone, which a table has of such a weight, is never read
        else:
            scale_inv = scale_inv.to(device)
            dropped._kept = [scale_inv.float().reciprocal(), scale_inv]
        dropped._codes = wire
        return dropped


def _part_dequantized(operand: Operand, shape: torch.Size, offset: tuple[int, int]) -> torch.Tensor:
    """Return float32 values of a part of a matrix; ``operand`` has its data, and the scales of the whole matrix."""
    # Tiles of the whole matrix need not begin where the part does: a scale for each element.
    scale_inv = reference.spread(operand.scale_inv.float(), operand.format.tile, shape, offset).expand(shape)
    format = dataclasses.replace(operand.format, tile=Tile(1, 1))
    return reference.dequantize(
        Operand(operand.data, scale_inv, format, operand.global_scale_inv), torch.float32
    )


aten = torch.ops.aten


class Primary:
    """Holds what all views of one primary weight share.

    Attributes:
        record: of the weight; None while ``torch.compile`` traces.
        shape: of the weight, or of this rank's shard of it.
        dtype: what the weight is to the model and to autograd; values are rounded to it before they are cast.
        sharded: whether it is one rank's shard.
        master: the high-precision values, in the optimizer; None once they were dropped.
        dropping: drop a shard's master as soon as its data were gathered.
        codes: what the data dequantize with once the master was dropped: a Float8Tensor or a shard.
    """

    codes: Any

    def __init__(
        self,
        record: WeightRecord | None,
        fqn: str,
        shape: torch.Size,
        dtype: torch.dtype,
        *,
        sharded: bool,
    ) -> None:
        self.record, self.fqn = record, fqn
        self.shape = shape
        self.dtype = dtype
        self.sharded = sharded
        self.master: MasterWeight | None = None
        self.dropping = False
        self.codes = None

    def drop(self, codes: Any) -> None:
        """Let go of the master; ``codes`` hold the weight from now on."""
        self.master, self.codes = None, codes

    def values(self) -> torch.Tensor:
        """Return the weight in high precision, ``shape`` and ``dtype``: the master rounded, or the data dequantized."""
        if self.master is not None:
            return self.master.plain.to(self.dtype)
        dequantized: torch.Tensor = self.codes.dequantize()
        return dequantized.view(self.shape).to(self.dtype)


class _PrimaryReference:
    """Names the weight that the views of one handle belong to; None for zeros that FSDP2 made to copy a weight into."""

    __slots__ = ("primary",)

    def __init__(self, primary: Primary | None) -> None:
        self.primary = primary


Self = TypeVar("Self", bound="PrimaryWeight")


class PrimaryWeight(Weight):
    """A parameter that is stored as float8. See the module's docstring.

    Reading it gives the master's values rounded to ``dtype``, or the dequantized data where the master was dropped.
    Writing to it writes to the master.

    Raises:
        Float8ConfigError: on a write after the master was dropped.
    """

    __torch_function__ = no_torch_function

    OWN_ATTRIBUTES: ClassVar = frozenset({"_geometry", "_slot"})
    """What an instance holds besides the attributes that users set on their parameters."""

    _geometry: torch.Tensor
    _slot: _PrimaryReference

    @staticmethod
    def __new__(
        cls: type[Self],
        geometry: torch.Tensor,
        slot: _PrimaryReference | None = None,
        device: torch.device | None = None,
        *,
        requires_grad: bool | None = None,
    ) -> Self:
        """See ``of``; ``geometry`` is a meta tensor of this view's shape, strides and dtype.

        Raises:
            Float8ConfigError: it is called as ``nn.Parameter`` is, as accelerate does to move a parameter.
        """
        if slot is None:
            raise Float8ConfigError(
                f"a float8 primary weight cannot be created of values, as accelerate's offloading and "
                f"dispatch_model do, found some of shape {tuple(geometry.shape)}; convert without primary_weights=True "
                "to offload a model"
            )
        self: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            geometry.shape,
            strides=geometry.stride(),
            storage_offset=geometry.storage_offset(),
            dtype=geometry.dtype,
            device=device,
        )
        self._geometry, self._slot = geometry, slot
        return self

    def __init__(
        self,
        geometry: torch.Tensor,
        slot: _PrimaryReference | None = None,
        device: torch.device | None = None,
        *,
        requires_grad: bool | None = None,
    ) -> None:
        super().__init__()

    @classmethod
    def of(cls: type[Self], primary: Primary, device: torch.device) -> Self:
        """Return a handle of the whole weight, or of this rank's whole shard of it."""
        return cls(
            torch.empty(primary.shape, dtype=primary.dtype, device="meta"), _PrimaryReference(primary), device
        )

    @property
    def primary(self) -> Primary:
        """The record that all views of the weight share."""
        if self._slot.primary is None:
            raise Float8ConfigError(
                f"zeros of shape {tuple(self.shape)} that were created with new_zeros from a float8 primary weight "
                "only serve to copy that whole weight into; use torch.zeros, and drop_high_precision after fully_shard"
            )
        return self._slot.primary

    @property
    def record(self) -> WeightRecord | None:
        """The weight's record; None for zeros that FSDP2 made to copy a weight into."""
        return None if self._slot.primary is None else self._slot.primary.record

    @property
    def master(self) -> MasterWeight | None:
        """The high-precision values, in the optimizer."""
        return self.primary.master

    @property
    def plain(self) -> torch.Tensor:
        """The values as an ordinary tensor on this handle's device; a copy unless the master has their dtype."""
        values = self.primary.values()
        view = values.as_strided(self.shape, self.stride(), values.storage_offset() + self.storage_offset())
        return view.to(self.device)

    @property
    def data(self) -> torch.Tensor:
        """A view of the weight that autograd does not know of."""
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        """Write to the master, as ``copy_`` does: what ``nn.Module.to`` and ``to_empty`` call."""
        if values.dtype != self.dtype or values.shape != self.shape:
            gone = self.primary.master is None
            why = "once its high-precision values were dropped" if gone else "under its master"
            before = "drop_high_precision(model)" if gone else "MasterWeights(optimizer)"
            raise Float8ConfigError(
                f"{self.primary.fqn}: its float8 weight of dtype {self.dtype} cannot become {values.dtype} of shape "
                f"{tuple(values.shape)} {why}; call model.to(dtype) before {before}"
            )
        with torch.no_grad():
            self.copy_(values)

    def exported_as(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return what a state dict holds: the master itself, so that loading reaches it, or values of its own."""
        primary = self.primary
        if primary.master is None or primary.master.dtype != self.dtype:
            return like_sharded(self.plain, parameter)
        view = _master_view(self)
        if not primary.sharded:
            return like_sharded(view.exported, parameter)
        view.copies_plainly = True
        return like_sharded(view, parameter)

    @property
    def cast_by_shard(self) -> MasterWeight | None:
        """The master, or the empty one of codes that were loaded."""
        codes = self.primary.codes
        return codes.master if isinstance(codes, LoadedCodes | DroppedShard) else self.primary.master

    def was_sharded(self, shard: Shard) -> None:
        """Give data that were loaded to the shard."""
        if isinstance(codes := self.primary.codes, LoadedCodes):
            self.primary.drop(codes.given_to(shard))

    def was_gathered(self, shard: Shard) -> None:
        """Drop a master that is to be dropped, once its fresh data were gathered."""
        if self.primary.dropping and not isinstance(shard, DroppedShard):
            self.primary.drop(DroppedShard.of(shard))

    @property
    def _traced(self) -> torch.Tensor:
        """The tensor that torch.compile traces: the master, which it casts, or the float8 data alone."""
        primary = self.primary
        if primary.master is None:
            return cast(torch.Tensor, primary.codes)
        # Torch takes a master for a plain tensor, and what wraps a traced one for a tensor of tensors.
        return primary.master if primary.master._wrapped is None else primary.master._wrapped

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_traced"], (self.primary.fqn, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls: type[Self],
        inner: dict[str, torch.Tensor],
        context: Any,
        outer_size: Sequence[int],
        outer_stride: Sequence[int],
    ) -> Self:
        fqn, dtype = context
        values = inner["_traced"]
        primary = Primary(None, fqn, torch.Size(outer_size), dtype, sharded=False)
        if is_of_tensors(values):
            primary.codes = values
        else:
            primary.master = values if isinstance(values, MasterWeight) else MasterWeight(values)
        return cls.of(primary, values.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a weight of its own in high precision, which no optimizer has taken."""
        if id(self) not in memo:
            copy: Any = self.plain.clone()
            if (master := self.primary.master) is not None:
                copy = type(master)(copy)
                copy.cell.record = master.record
            if isinstance(self, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, self.requires_grad)
            if self.grad is not None:
                copy.grad = self.grad.__deepcopy__(memo)
            memo[id(self)] = copy
        return memo[id(self)]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        primary = self._slot.primary
        where = (
            "" if primary is None else ", dropped" if primary.master is None else f", {primary.master.dtype}"
        )
        return f"{type(self).__name__}({tuple(self.shape)}, dtype={self.dtype}, master={where[2:] or None})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Views are of the handle; any other operator reads values, and writes to the master."""
        kwargs = kwargs or {}
        # Operators by which FSDP2, DTensor and nn.Module re-make weights: the result is a handle again.
        if (handler := _HANDLERS.get(func)) is not None:
            return handler(func, args, kwargs)
        op = describe(func)
        if op.is_view:
            return _view(func, args, kwargs)
        written = [
            args[position] if position < len(args) else kwargs.get(name) for position, name in op.written
        ]
        results = tree_leaves(written)
        # The handle has no storage: what is written to it has to land in the master.
        targets = {id(t): _master_view(t) for t in results if isinstance(t, PrimaryWeight)}
        dtypes = {t.dtype: targets[id(t)].dtype for t in results if id(t) in targets}
        kept = set(map(id, results))

        def given(t: torch.Tensor) -> torch.Tensor:
            if id(t) in kept:
                return targets.get(id(t), t)
            values = t.plain if isinstance(t, PrimaryWeight) else t
            return values.to(dtypes.get(values.dtype, values.dtype))  # many operators take one dtype alone

        args_in, kwargs_in = tree_map_only(torch.Tensor, given, (args, kwargs))
        out = func(*args_in, **kwargs_in)
        # An in-place operator returns what it was called with, which is the handle.
        return written[0] if targets and isinstance(out, MasterWeight) else out


def primary_rowwise(
    weight: PrimaryWeight, format: Float8Format, dtype: torch.dtype, source: LayerSource = CURRENT
) -> Operand:
    """Return an unsharded primary weight's rowwise operand, cast again after the master changed.

    Args:
        weight: (N, K), or (E, N, K), of which the operand has all rows, one expert's after the other's.
        format: of the quantized data.
        dtype: the GEMM's high-precision dtype; values are rounded to it, after the weight's own, and then cast.
        source: of the scale, where there is a master to cast.

    Raises:
        Float8ConfigError: the master was dropped and the data left are of another format.
    """
    primary = weight.primary
    if primary.master is not None:
        master: Any = primary.master.flatten(0, -2)
        return rowwise_of(master, format, dtype, source, primary.dtype)
    kept: Operand | None = primary.codes.rowwise
    if kept is None or kept.format != format:
        raise Float8ConfigError(
            f"{primary.fqn}: asked for codes of {format}, but its master was dropped and its codes are "
            f"{primary.codes!r}; use the recipe that it was converted with"
        )
    return kept


PrimaryWeight.rowwise_codes = staticmethod(primary_rowwise)


def like_sharded(local: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``local`` as this rank's part of a tensor that is sharded as ``weight`` is; itself where that is not."""
    if not is_dtensor(weight):
        return local
    mesh, placements, shape, stride = weight.device_mesh, weight.placements, weight.shape, weight.stride()
    # A check would communicate, and a rank may take its state dict alone.
    return weight.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _master_view(weight: PrimaryWeight) -> MasterWeight:
    """Return the view of the master that a write to ``weight`` has to write to."""
    primary = weight.primary
    if (master := primary.master) is None:
        raise Float8ConfigError(
            f"{primary.fqn}: its high-precision values were dropped, so its float8 codes cannot be changed; load "
            "state dicts and initialize before drop_high_precision(model), or call restore_high_precision(model) first"
        )
    offset = master.storage_offset() + weight.storage_offset()
    return cast(MasterWeight, master.detach().as_strided(weight.shape, weight.stride(), offset))


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight: PrimaryWeight = args[0]
    # On the meta tensor: torch works out shapes and strides, of which the handle has nothing but those.
    views = func(weight._geometry, *args[1:], **kwargs)
    return tree_map_only(
        torch.Tensor, lambda geometry: type(weight)(geometry, weight._slot, weight.device), views
    )


def _copy_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``copy_``: FSDP2's copy of a weight into zeros of the padded shape, or new values for the master.

    A floating-point value that the master rounds to already changes nothing: what a state dict in a narrower dtype
    cannot hold is not lost when it is loaded back, in whichever order a model and its optimizer are.
    """
    target, source = args[:2]
    if not isinstance(target, PrimaryWeight):
        return func(target, source.plain, *args[2:], **kwargs)
    if isinstance(source, PrimaryWeight):
        if target._slot.primary is None and source.shape == source.primary.shape:
            # FSDP2 pads a short shard: the zeros become a handle of the same weight.
            target._slot.primary = source.primary
        # Two handles of one weight: there is nothing to copy.
        if target._slot.primary is source.primary:
            return target
    if is_raw(source):
        raise written_raw(target.primary.fqn, source.dtype)
    master = _master_view(target)
    values = (source.plain if isinstance(source, Weight) else source).to(master.device)
    if values.is_floating_point():
        values = torch.where(master.to(values.dtype) == values, master, values.to(master.dtype))
    master.copy_(values)
    return target


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``to``: another dtype gives values; another device is FSDP2's CPU offload, or a move without a master."""
    weight: PrimaryWeight = args[0]
    primary, device = weight.primary, torch.device(kwargs.get("device") or weight.device)
    if kwargs.get("dtype") not in (None, weight.dtype):
        return func(weight.plain, **kwargs)
    if not primary.sharded and device != weight.device:
        if primary.master is not None:
            raise Float8ConfigError(
                f"{primary.fqn}: to {device} would part the weight from its master on {weight.device}; move the model "
                "before MasterWeights(optimizer)"
            )
        # A Primary of its own, because views of the weight before the move still read its codes there.
        moved = Primary(primary.record, primary.fqn, primary.shape, primary.dtype, sharded=False)
        moved.codes = primary.codes.to(device)
        return type(weight)(weight._geometry, _PrimaryReference(moved), device)
    return type(weight)(weight._geometry, weight._slot, device)


def _same_handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight: PrimaryWeight = args[0]
    return type(weight)(weight._geometry, weight._slot, weight.device)


def _new_zeros(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return zeros for FSDP2 to copy the weight into; plain ones where another dtype or device is asked for."""
    weight: PrimaryWeight = args[0]
    options = {name: value for name, value in kwargs.items() if value is not None}
    # On meta, because these zeros are never read: FSDP2 copies the weight over them.
    geometry = func(weight._geometry, *args[1:], **{**options, "device": "meta"})
    if geometry.dtype == weight.dtype and torch.device(options.get("device", weight.device)) == weight.device:
        return type(weight)(geometry, _PrimaryReference(None), weight.device)
    return torch.zeros(geometry.shape, dtype=geometry.dtype, device=options["device"])


def _plain_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return plain tensors of the weight's shape, for gradients, buffers and optimizer states."""
    weight: PrimaryWeight = args[0]
    return func(weight._geometry, *args[1:], **{**kwargs, "device": kwargs.get("device") or weight.device})


_HANDLERS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    aten.copy_.default: _copy_into,
    aten._to_copy.default: _to_copy,
    # FSDP2 pins shards for CPU offload, and a handle has no memory to pin.
    aten._pin_memory.default: _same_handle,
    aten.new_zeros.default: _new_zeros,
    aten.empty_like.default: _plain_like,
    aten.new_empty.default: _plain_like,
    aten.zeros_like.default: _plain_like,
}
