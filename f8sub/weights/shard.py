"""One rank's shard of a float8 weight: its tiles in the amax table, its float8 data for the wire.

PendingCodes: what FSDP2 is given to gather, cast right into the memory that it sends.

FSDP2 copies the inputs of an all-gather side by side into one tensor, by an operator of its own. The weights of a group
are cast when that runs, into that tensor, by one launch where kernels take them together. No codes are copied or kept.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from typing_extensions import override

from f8sub.capture import current_capture, is_capturing
from f8sub.formats import ALL, Float8Format, present
from f8sub.kernels import cuda, reference
from f8sub.kernels.scales import PriorScale, first_tile, scales_or_nan, shard_amax
from f8sub.kernels.triton.multi_tensor_launch import ShardInTable
from f8sub.kernels.triton.support import ALIGNMENT, STEP_SPAN, ShardSlice
from f8sub.torch_compat import (
    ALL_GATHER_COPY_IN,
    Places,
    no_torch_function,
    preserve_version_counter,
    tree_map_only,
    unknown_operator,
)
from f8sub.weights.layout import ShardLayout, WireFormat
from f8sub.weights.master_weight import Mark, MasterWeight, State, marks_of
from f8sub.weights.weight import Weight, WeightRecord, is_raw, master_of, written_raw

if TYPE_CHECKING:
    from f8sub.weights.exchange import Exchange


class TableScales(NamedTuple):
    """A weight's amaxes and scales, which the table writes in place; one entry a ``wire.table_tile``.

    The unsharded tensor holds ``part_scale_inv``, unless the wire carries its own: under tensor parallelism a copy of a
    part of ``scale_inv``, else that very tensor. ``global_scale_inv`` is (1, 1), of formats with two levels of scales.
    """

    amax: torch.Tensor
    scale: torch.Tensor
    scale_inv: torch.Tensor
    part_scale_inv: torch.Tensor
    global_scale_inv: torch.Tensor | None


@dataclass
class NextScales:
    """The scales of a weight that changed while FSDP2 had it gathered: those of its next all-gather.

    Until then what is gathered is read with the scales that it was cast with.

    Attributes:
        written: pairs of the tensors that the unsharded weight reads and of what they become.
        cast: whether the next all-gather has cast the weight.
    """

    written: list[tuple[torch.Tensor, torch.Tensor]]
    cast: bool = False


W = TypeVar("W", bound=Weight)


class KnownAmax(NamedTuple):
    """The amaxes of a weight in one state, which the step that wrote the weight found: an entry of ``found``."""

    found: "FoundAmaxes"
    entry: int
    of: State

    def is_of(self, master: MasterWeight) -> bool:
        """Return whether the weight is in the state that a step, launched or replayed, left it in."""
        marks = self.found.marks
        return self.of == master.state or marks[self.entry : self.entry + 1] == marks_of([master])


class FoundAmaxes:
    """The amaxes that the last step of an optimizer found.

    Attributes:
        amaxes: those of each shard that was stepped, side by side, float32.
        starts: where those of a shard begin, by its entry; and at the end, how many there are.
        marks: of the shards by entry, as the last replay of the step left them; empty where none was replayed.
    """

    def __init__(self, starts: list[int], device: torch.device) -> None:
        self.starts = starts
        self.amaxes = torch.zeros(max(starts[-1], 1), dtype=torch.float32, device=device)
        self.marks: list[Mark] = []

    def places(self, entry: int) -> range:
        """Where the amaxes of a shard are."""
        return range(*self.starts[entry : entry + 2])

    def by_step(self, shards: "Sequence[Shard]") -> None:
        """Note that a step has just found the amaxes of shards, in the order of their entries."""
        for entry, shard in enumerate(shards):
            shard.known = KnownAmax(self, entry, shard.master.state)

    def by_replay(self, shards: "Sequence[Shard]") -> None:
        """Note the same of a replay, which has to be fast."""
        self.marks = marks_of([shard.master for shard in shards], as_owned=True)

    def written_to(self, entries: "Mapping[Shard, int]") -> "list[Shard]":
        """Return the shards that were written to since a step found their amaxes, in these entries."""
        # The usual case: none was, since the replay before.
        if len(self.marks) > max(entries.values()):
            before = [self.marks[entry] for entry in entries.values()]
            if before == marks_of([shard.master for shard in entries]):
                return []
        found = [(shard, entry, shard.amax_now) for shard, entry in entries.items()]
        return [s for s, entry, now in found if now is None or (now.found, now.entry) != (self, entry)]


class Shard:
    """One rank's shard of one weight, as the all-gather sees it.

    Attributes:
        sent: whether FSDP2 gathers the weight as float8; else its layers cast it, and it is here for a guest.
        gathers: all-gathers of this weight so far; the same on every rank, because each is a collective.
        copies_scales: whether ``scales_written`` has any to copy.
        dtype: the weight is rounded to it before it is cast: FSDP2's ``param_dtype``, or the weight's own.
        amax_of: the state of ``master`` that its amax was taken from.
        known: what ``fused_step`` found of the shard; of a later state of ``master`` it says nothing.
        kept: what ``pending`` returned last; not under CPU offload, which copies to a GPU for every gather.
        casts: those of the weights that it was gathered with last, if it was the first of them.
        next_scales: what the unsharded weight's scales become when it is gathered again; None where they are in place.
    """

    scales: TableScales

    def __init__(
        self,
        record: WeightRecord,
        master: MasterWeight,
        layout: ShardLayout,
        dtype: torch.dtype | None,
        exchange: "Exchange",
        prior: Callable[[], PriorScale] | None,
        *,
        sent: bool,
    ) -> None:
        self.fqn, self.master, self.layout, self.prior, self.sent = record.fqn, master, layout, prior, sent
        self.wire = WireFormat(present(record.format), layout, record.fqn)
        self.format = self.wire.format
        self.gathers = 0
        self.dtype = dtype or (master.dtype if record.parameter is None else record.parameter.dtype)
        self._follows_dtype = dtype is None
        self._exchange = weakref.ref(exchange)
        self.amax_of: State | None = None
        self.known: KnownAmax | None = None
        self.kept: PendingCodes | None = None
        self.casts: Casts | None = None
        self.next_scales: NextScales | None = None
        self.sent_shape = layout.stacked(
            torch.empty(self.wire.padded_shape, dtype=torch.uint8, device="meta")
        ).shape

    @property
    def exchange(self) -> "Exchange":
        """The exchange that supplies its scales, not held: a primary weight without a master holds its shard alone."""
        exchange = self._exchange()
        if exchange is None:
            raise RuntimeError(f"{self.fqn}: its weight is gathered and its model is gone")
        return exchange

    @property
    def values(self) -> torch.Tensor:
        """The shard in high precision, as a matrix."""
        return self.layout.matrix(self.checked(self.master).plain)

    def checked(self, source: W) -> W:
        """Return ``source``, the shard on some device; raise Float8ConfigError where it became codes without scales."""
        # ``weight.data = codes`` shows in no operator.
        if is_raw(source):
            raise written_raw(self.fqn, source.dtype)
        return source

    @property
    def table_shape(self) -> tuple[int, int]:
        """The shape of the weight's entries in the amax table."""
        return self.wire.table_tile.scale_shape(self.layout.whole)

    @property
    def rule(self) -> tuple[Float8Format, float, torch.dtype]:
        """All that the scales depend on besides the amax: format, the prior scale's margin (-1 without one), dtype."""
        return self.format, -1.0 if self.prior is None else self.prior().margin, self.dtype

    @property
    def stale(self) -> bool:
        """True if the shard changed since its amax was taken."""
        return self.amax_of != self.master.state or not self.master.owns_storage

    @property
    def amax_now(self) -> KnownAmax | None:
        """``known``, if it is of the shard as it is."""
        # In this order: ``owns_storage`` may find that others wrote to the weight, and count it as a change.
        if (known := self.known) is None or not self.master.owns_storage or self.master.cell.replayed:
            return None
        return known if known.is_of(self.master) else None

    @property
    def is_cast_again(self) -> bool:
        """True if each all-gather casts the weight with the scales in the table; else they travel with the data."""
        return not self.wire.carries_scales

    @property
    def shows_changes(self) -> bool:
        """True if every change of the weight is one of this shard; ``dcp.load`` writes nothing to an empty one."""
        return self.master.numel() > 0

    def follow(self, held: torch.Tensor) -> None:
        """Use another local tensor, which the parameter holds now.

        FSDP2 pads a short shard again, on that rank alone. A copy of what the scales were computed from is no change.
        """
        local = master_of(held)
        if local is None or local.cell is self.master.cell:
            return
        # The dtype is part of the rule: scales of this weight are computed apart from its neighbours' now.
        if self._follows_dtype and held.dtype != self.dtype:
            self.dtype = held.dtype
            self.exchange.settle()
            self.exchange.table.group_by_rule()
        was_fresh = not self.stale and local.cell.copies(self.master.cell, local.shape)
        self.master = local
        self.amax_of = local.state if was_fresh else None

    @property
    def found_by_a_step(self) -> tuple[int, int]:
        """How many amaxes a step over the shard's memory finds, 0 for none; and of how many elements, 0 for all."""
        tile, (first, _) = self.wire.table_tile, self.layout.offset
        if tile.is_whole:
            return 1, 0
        # Experts have an amax each.
        values = self.values
        if tile.cols != ALL or tile.rows == ALL or first % tile.rows or len(values) % tile.rows:
            return 0, 0
        every = tile.rows * values.shape[1]
        if every % STEP_SPAN or not values.is_contiguous():
            return 0, 0
        return len(values) // tile.rows, every

    @property
    def entries(self) -> range:
        """The entries of the table that take the amaxes which a step found."""
        if self.wire.table_tile.is_whole:
            start = int(self.scales.amax.storage_offset())
            return range(start, start + 1)
        where = self.in_table
        count, _ = self.found_by_a_step
        return range(where.entry, where.entry + count * where.entry_stride, where.entry_stride)

    @property
    def in_table(self) -> ShardInTable:
        """The shard, and where its amaxes go."""
        tile, offset, in_a_row = self.wire.table_tile, self.layout.offset, self.scales.amax.shape[1]
        row, col = first_tile(tile, offset)
        # Where the shard's first tile stands in the flat table: a shard may begin in the middle of a tile.
        entry = int(self.scales.amax.storage_offset()) + row * in_a_row + col
        return ShardInTable(self.values, tile, offset, entry, in_a_row)

    def amaxes(self) -> torch.Tensor:
        """The amax of every tile that the shard touches, flat, in float32."""
        return shard_amax(self.values, self.wire.table_tile, self.layout.offset).flatten().float()

    def write_amax(self) -> None:
        """Write the amax of every tile the shard touches into the table, which is zero there."""
        if self.master.numel():
            touched = shard_amax(self.values, self.wire.table_tile, self.layout.offset)
            row, col = first_tile(self.wire.table_tile, self.layout.offset)
            self.scales.amax[row : row + touched.shape[0], col : col + touched.shape[1]] = touched

    def lay_out(self, amax: torch.Tensor, scale: torch.Tensor, scale_inv: torch.Tensor) -> None:
        """Take the weight's entries of the table, flat, as its own; scales of other dtypes have a tensor apart."""
        shape, rule, device = self.table_shape, self.format.scale_rule, amax.device
        scale_inv = scale_inv.view(shape)
        if rule.stored_as != torch.float32:
            scale_inv = torch.ones(shape, dtype=torch.float32, device=device).to(rule.stored_as)
        part = self.layout.tiles_of_part(scale_inv, self.wire.table_tile)
        whole = part.shape == scale_inv.shape
        # A tensor-parallel part's scales need not be one piece of memory, which GEMMs take: they get a copy.
        part = scale_inv if whole else part.clone(memory_format=torch.contiguous_format)
        self.copies_scales = not whole
        of_all = torch.ones(1, 1, dtype=torch.float32, device=device) if rule.has_global else None
        self.scales = TableScales(amax.view(shape), scale.view(shape), scale_inv, part, of_all)

    def scales_written(self) -> None:
        """Copy the scales that were just computed to the rank's tensor-parallel part."""
        scale_inv, part = self.scales.scale_inv, self.scales.part_scale_inv
        if part is not scale_inv:
            with preserve_version_counter(part):
                part.copy_(self.layout.tiles_of_part(scale_inv, self.wire.table_tile))

    def scales_beside(self) -> TableScales:
        """Return where to write the weight's scales, which the unsharded weight gets later, see ``next_scales``."""
        of_all = self.scales.global_scale_inv
        read = [self.scales.scale_inv, *([] if of_all is None else [of_all])]
        beside = [torch.empty_like(scales) for scales in read]
        self.next_scales = NextScales(list(zip(read, beside, strict=True)))
        return self.scales._replace(
            scale_inv=beside[0], global_scale_inv=None if of_all is None else beside[1]
        )

    def take_scales(self, of_all: torch.Tensor, *, later: bool) -> None:
        """Take the weight's entries of a table that was written beside its own; ``later``, see ``next_scales``."""
        scales = self.scales.scale_inv
        become = of_all.as_strided(scales.shape, scales.stride(), scales.storage_offset())
        if later:
            self.next_scales = NextScales([(scales, become)])
        else:
            with preserve_version_counter(scales):
                scales.copy_(become)

    def was_cast(self) -> None:
        """Note that an all-gather begins, of data that were cast with the scales in the table."""
        if self.next_scales is not None:
            self.next_scales.cast = True

    def was_gathered(self) -> None:
        """Note that the all-gather ended, whose data the unsharded weight reads from now on."""
        # Data that were on their way when scales were computed are of those from before.
        if self.next_scales is not None and self.next_scales.cast:
            self.use_next_scales()

    def use_next_scales(self) -> None:
        """Write the scales of the weight as it is to where the unsharded weight reads them."""
        if self.next_scales is None:
            return
        for scales, become in self.next_scales.written:
            with preserve_version_counter(scales):
                scales.copy_(become)
        self.next_scales = None
        self.scales_written()

    def part_of(self, source: Weight) -> ShardSlice | None:
        """Return ``source``, see ``pending``, for a launch that casts many matrices; None where that cannot be."""
        values = self.layout.matrix(self.checked(source).plain)
        if self.wire.carries_scales or not values.is_contiguous():
            return None
        width = self.wire.padded_shape[1]
        return ShardSlice(values, self.format, self.dtype, self.layout.offset, self.scales.scale, width)

    def pending(self, source: Weight) -> torch.Tensor:
        """Return the float8 data for FSDP2 to gather, of ``sent_shape``; ``source`` is on the device that gathers."""
        # CPU offload: FSDP2 copies the shard to the GPU for each gather, and a kept one would hold that copy.
        if source.device != self.master.device:
            return PendingCodes(self, source)
        if self.kept is None or self.kept.source is not source or self.kept.device != source.device:
            self.kept = PendingCodes(self, source)
        return self.kept

    def cast(self, source: Weight, *, beyond_range: float | None = None) -> torch.Tensor:
        """Return the data for the wire, uint8, ``wire.padded_shape``; see ``cast_into``."""
        values = self.layout.matrix(self.checked(source).plain)
        codes = torch.zeros(self.wire.padded_shape, dtype=torch.uint8, device=values.device)
        self.cast_into(codes, values, beyond_range)
        return codes

    def cast_into(self, wire: torch.Tensor, values: torch.Tensor, beyond_range: float | None = None) -> None:
        """Write the quantized values of the shard, with the scales that the table holds.

        Args:
            wire: uint8, ``wire.padded_shape``, zero past the values.
            values: the shard as a matrix.
            beyond_range: set values to NaN that are larger than this many times the format's range, if it has NaN, so
                that data cast with an older scale are right or visibly wrong; None to clamp them.
        """
        if not values.numel():
            return
        format = self.format
        rows = wire[: values.shape[0]]
        offset, scale = self.layout.offset, self.scales.scale
        if self.wire.carries_scales:
            # Tiles of a row begin with the row, and every rank has whole rows: the shard is
            # quantized like a matrix of its own.
            offset, values = (0, 0), values.to(self.dtype)
            made = scales_or_nan(shard_amax(values, format.tile, offset), format)
            self.wire.scales_of(rows).copy_(made.scale_inv)
            scale = made.scale
        elif beyond_range is not None and format.has_nan:
            values = values.to(self.dtype)
            scaled = values.float() * reference.spread(scale, format.tile, values.shape, offset)
            values = values.masked_fill(scaled.abs() > beyond_range * format.max, torch.nan)
        kernels = reference if values.is_cpu else cuda
        kernels.cast_into(rows, values, scale, format, offset, self.dtype)


class PendingCodes(torch.Tensor):
    """uint8 data of a shard, in the shape that FSDP2 expects, without memory. Other operators get them cast.

    Attributes:
        shard: the shard that is cast.
        source: what is cast: the shard, on the device that gathers it.
    """

    __torch_function__ = no_torch_function

    shard: "Shard"
    source: "Weight"

    @staticmethod
    def __new__(cls: type["PendingCodes"], shard: "Shard", source: "Weight") -> "PendingCodes":
        """Cast nothing yet."""
        self: PendingCodes = torch.Tensor._make_wrapper_subclass(
            cls, shard.sent_shape, dtype=torch.uint8, device=source.device
        )
        self.shard, self.source = shard, source
        return self

    @override
    def view(self, *shape: Any) -> torch.Tensor:
        """Return itself: FSDP2 flattens inputs and asks for bytes, before the operator that copies them."""
        return self if shape in ((-1,), (torch.uint8,)) else self.codes().view(*shape)

    def codes(self) -> torch.Tensor:
        """Return the data, in memory of their own."""
        self.shard.was_cast()
        return self.shard.layout.stacked(self.shard.cast(self.source))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name() == ALL_GATHER_COPY_IN:
            return _copy_in(*args)
        # FSDP2 without the operator above copies each input into the all-gather's memory: cast right into that.
        if func is torch.ops.aten.copy_.default and isinstance(args[1], PendingCodes):
            cast_into([args[1]], [args[0]])
            return args[0]
        if func.namespace == "fsdp":
            # Another operator of FSDP2 may want the data laid out otherwise: an error is better than a guess.
            raise unknown_operator(func.name())
        args, kwargs = tree_map_only(PendingCodes, lambda each: each.codes(), (args, kwargs or {}))
        return func(*args, **kwargs)


class Casts:
    """The casts of weights that are gathered together, worked out once; holds no tensor of theirs."""

    def __init__(self, pending: Sequence[PendingCodes], outs: Sequence[torch.Tensor]) -> None:
        self.state = _state(pending, outs)
        shards = [each.shard for each in pending]
        parts = [own.part_of(each.source) for own, each in zip(shards, pending, strict=True)]
        # Their padding is sent too, and the all-gather's memory is not zero.
        self._short = [n for n, own in enumerate(shards) if own.values.shape != own.wire.padded_shape]
        self._together, self._alone = cuda.cast_together(parts, outs)

    def run(self, pending: Sequence[PendingCodes], outs: Sequence[torch.Tensor]) -> None:
        """Cast the weights as they are now, each into its piece of ``outs``."""
        for number in self._short:
            outs[number].zero_()
        if self._together is not None:
            self._together(outs[0])
        for number in self._alone:
            shard, source = pending[number].shard, pending[number].source
            shard.cast_into(outs[number].view(shard.wire.padded_shape), shard.layout.matrix(source.plain))


def _state(pending: Sequence[PendingCodes], outs: Sequence[torch.Tensor]) -> list[Any]:
    """Return all that the casts depend on besides values.

    A graph that ``graph_step`` captures keeps what launched steps worked out, and any other has to do without.
    """
    # FSDP2 allocates new memory for each gather: what matters is its alignment, and how far apart the pieces are.
    begin = outs[0].data_ptr()
    found: list[Any] = [begin % ALIGNMENT, current_capture() is None and is_capturing(outs[0])]
    for each, out in zip(pending, outs, strict=True):
        shard, source, scale = each.shard, each.source, each.shard.scales.scale
        # Other memory at the same address may be of another dtype: a model goes to the CPU, to bfloat16, and back.
        found += shard, shard.dtype, source.dtype, source.data_ptr(), source.stride(), scale.data_ptr()
        found.append(out.data_ptr() - begin)
    return found


def _copy_in(
    inputs: Sequence[torch.Tensor], gathered: torch.Tensor, sizes: Sequence[int], size: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    own, outs = pieces_of(gathered, sizes, size, rank)
    plain = [number for number, each in enumerate(inputs) if not isinstance(each, PendingCodes)]
    # Norms, biases and weights in high precision are gathered with these.
    if plain:
        torch._foreach_copy_([outs[number] for number in plain], [inputs[number] for number in plain])
    pending = [(each, out) for each, out in zip(inputs, outs, strict=True) if isinstance(each, PendingCodes)]
    cast_into([each for each, _ in pending], [out for _, out in pending])
    return own, gathered


def pieces_of(
    gathered: torch.Tensor, sizes: Sequence[int], size: int, rank: int
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """A rank's part of what FSDP2 gathers into, which the all-gather sends from in place, and its pieces.

    Args:
        gathered: the output of an all-gather, flat, or ``Places``.
        sizes: elements of each piece.
        size: elements of a rank.
        rank: the rank.
    """
    if isinstance(gathered, Places):
        return gathered, gathered.pieces(rank)
    own = gathered.narrow(0, size * rank, size)
    return own, own.split(list(sizes))


def cast_into(pending: Sequence[PendingCodes], outs: Sequence[torch.Tensor]) -> None:
    """Cast each shard into contiguous bytes; in one launch, where kernels do."""
    # FSDP2 gathers the same parameters together each time, so the first weight stands for all of them.
    first = pending[0].shard
    if first.casts is None or first.casts.state != _state(pending, outs):
        first.casts = Casts(pending, outs)
    if (capture := current_capture()) is not None:
        capture.keep(first.casts)
    first.casts.run(pending, outs)
    for each in pending:
        each.shard.was_cast()
