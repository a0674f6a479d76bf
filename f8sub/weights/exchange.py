"""Exchange: what the ranks that shard the same weights alike reduce together, by one all-reduce.

[Note: from an optimizer step to scales]

    every shard's amaxes, and the guests' regions -> one flat table -> all-reduce(MAX) -> scales, in place

- ``precompute_scales`` (``precompute_scales.py``) asks every exchange of a model for a reduction. The hooks in that
  file tell the Conversion of optimizer steps.
- The amax table (``amax_table.py``) is flat float32 memory, the same on every rank. Shards and unsharded weights look
  at its parts, so that scales that are written there are theirs.
- A region (``guests.py``) is a feature's part of the table. Regions that are due ride along. Such a reduction is over
  all ranks that hold the layers, HSDP's replicas too; any other one is of the weights alone, over the ranks that
  shard them.
- Findings (``findings.py``) are what a reduction met that is worth telling: NaN, infinity, a weight that changed on
  some ranks only. They are told by the next reduction, so that nothing waits for the device.

When the table is reduced is decided by what every rank knows, never by what one rank alone knows:

- An optimizer step or ``load_state_dict`` happened since the last reduction. Ranks that call precompute_scales reduce
  there, a rank that forgot does it before its next all-gather: each rank once, on a process group of the table's own,
  without waiting until the scales are needed, so other collectives in between cannot cross it.
- precompute_scales is called without such an event: the ranks agree over the store that all of them did.
- A shard changed in another way (an in-place operator, ``dcp.load``). One rank cannot know whether the others changed
  theirs too, so it tells the store, joins the all-gather as it is, and reads the store again: the all-gather is over,
  so every rank has passed the point where it would have said so. If all did, all reduce, and gather this weight
  again. If not, the codes stand: those the old scale can hold are right, the others are NaN. Under tensor parallelism
  the ranks of one all-gather have a part of the weight; those of all parts agree over the store then.
"""

import enum
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist

from f8sub.errors import Float8ConfigError, Float8Warning
from f8sub.torch_compat import is_capturing
from f8sub.weights.agreement import all_arrive, all_told, tell
from f8sub.weights.amax_table import AmaxTable
from f8sub.weights.findings import Findings
from f8sub.weights.layout import ShardLayout
from f8sub.weights.ranks import OwnGroup, own_group
from f8sub.weights.record import WeightRecord
from f8sub.weights.shard import Shard
from f8sub.weights.weight import Weight

if TYPE_CHECKING:
    from f8sub.weights.conversion import Conversion, Guest

_RANGE_SLACK = 1.0 + 2.0**-4
"""Codes cast with an older scale may exceed the format's range by this factor, half a step of e4m3's rounding."""


class Region(Protocol):
    """A feature's part of an exchange's table; every rank has the same regions.

    Attributes:
        size: number of float32 entries.
    """

    size: int

    @property
    def due(self) -> bool:
        """Whether it has something to reduce, as every rank knows."""

    def write(self, out: torch.Tensor) -> None:
        """Write what this rank knows, float32, (size,); the maximum over the ranks is taken of it."""

    def read(self, reduced: torch.Tensor, weight_amax: torch.Tensor) -> torch.Tensor:
        """Take the maximum; before the scales of the weights are made, which it may decide.

        Args:
            reduced: float32, (size,).
            weight_amax: float32, the reduced amaxes of all weights; infinity for one that is not finite.

        Returns:
            float32, of one dimension, of a length that never changes: not 0 where there is something to tell.
        """

    def tell(self, found: torch.Tensor) -> list[str]:
        """Errors of what ``read`` returned, once that came to the host; may warn instead."""


class Freshness(enum.Enum):
    """The life of the scales, of which every rank knows the same: STALE, REDUCING, FRESH, and STALE again.

    What one rank alone knows, that its shard was written to, is no part of it: see ``Shard.stale``.
    """

    STALE = enum.auto()
    REDUCING = enum.auto()
    FRESH = enum.auto()


class _Reduction(NamedTuple):
    """An all-reduce under way (None on a single rank), and the regions in it."""

    work: dist.Work | None
    regions: list[tuple[Region, torch.Tensor]]


class Exchange:
    """See the module's docstring.

    Attributes:
        layout: of one of the weights: the ranks that gather and share it.
        shards: in the order of the table.
        generation: number of reductions whose scales are in place.
        gathers: whether FSDP2 gathers any of the weights as float8; else the exchange serves guests alone.
    """

    def __init__(self, conversion: "Conversion", layout: ShardLayout) -> None:
        self.conversion = conversion
        self.generation = 0
        self.gathers = False
        self.shards: list[Shard] = []
        self.layout = layout
        self._groups: dict[tuple[int, ...], OwnGroup] = {}
        self._regions: dict[Guest, Region] = {}
        self._under_way: _Reduction | None = None
        self._changes_covered = -1
        self._requests = 0
        self._asked_at = -1
        self._requested = self._captured = self._warned = False
        self._changed_alone: set[int] = set()
        self._findings: list[Findings] = []
        self._entries = AmaxTable([], [], "cpu")

    def set_records(self, records: Sequence[WeightRecord]) -> None:
        """Lay out the table: shards of one format side by side, the same order on every rank.

        Args:
            records: of the weights, each with its shard.

        Raises:
            Float8ConfigError: some are new and others were gathered already; those read scales where they lie now.
        """
        shards = dict.fromkeys(record.shard for record in records if record.shard is not None)
        if any(shard.gathers for shard in shards):
            new = next((shard.fqn for shard in shards if not shard.gathers), records[-1].fqn)
            raise Float8ConfigError(
                f"{new}: its weight was sharded after other layers of the same model were trained or run; call "
                "fully_shard on every part of a model before its first forward"
            )
        self.settle()
        self.gathers = any(shard.sent for shard in shards)
        self.shards = sorted(shards, key=lambda s: (*map(str, s.rule), s.fqn))
        device = self.shards[0].layout.device
        self._regions = {
            guest: region
            for guest in self.conversion.guests
            if (region := guest.region(records, device, self._regions.get(guest))) is not None
        }
        self._entries = AmaxTable(self.shards, [region.size for region in self._regions.values()], device)
        self._changes_covered = -1

    def group_by_rule(self) -> None:
        """Enter that weights have another dtype than before."""
        self.settle()
        self._entries.group_by_rule()

    @property
    def state(self) -> Freshness:
        """Where the scales are in their life, as every rank knows."""
        if self._changes_covered != self.conversion.changes:
            return Freshness.STALE
        return Freshness.FRESH if self._under_way is None else Freshness.REDUCING

    @property
    def due(self) -> bool:
        """Whether there is something to reduce, as every rank knows: the weights changed, or a region is due."""
        return self.state is Freshness.STALE or self.regions_due

    @property
    def regions_due(self) -> bool:
        """Whether a guest's region is due."""
        return any(region.due for region in self._regions.values())

    def request(self) -> None:
        """Reduce now, on every rank that calls this, unless one of them does not."""
        if not self.gathers:
            self._tell(-1)
            return
        self._requested = not (self.due or self._all_request())
        if not self._requested:
            self.reduce()
        if self._captured:
            self.settle()  # the replay of a graph waits for no reduction that began outside of it

    def _all_request(self) -> bool:
        self._requests += 1
        world = len(self.layout.sharers)
        return world == 1 or all_arrive(self._place_of("request", self.generation, self._requests), world)

    def reduce_regions(self) -> None:
        """Reduce the regions that are due now, where no all-gather will ask for scales."""
        if not self.gathers and self.regions_due:
            self.reduce(tell=False)
            self.settle()

    def reduce(self, *, tell: bool = True) -> None:
        """Take every shard's amaxes now and start the all-reduce; ``settle`` makes the scales of it.

        Args:
            tell: False to leave what was found before to the next reduction.

        Raises:
            Float8NumericsError: the reduction before this one found NaN or infinity in a weight, an x or a dy.
        """
        self.settle()
        if tell:
            self._tell(None)
        entries = self._entries
        regions = [
            (region, out)
            for region, out in zip(self._regions.values(), entries.parts, strict=True)
            if region.due
        ]
        table, ranks = (entries.whole, self.layout.ranks) if regions else (entries.amax, self.layout.sharers)
        work = None
        with torch.inference_mode(mode=False), torch.no_grad():
            entries.take_amaxes()
            if self._changed_alone:
                entries.amax[-1] = 1 + max(self._changed_alone)
                self._changed_alone.clear()
            for region, out in regions:
                region.write(out)
            if len(ranks) > 1:
                group = self.group_of(ranks).of_next_call()
                work = dist.all_reduce(table, dist.ReduceOp.MAX, group=group, async_op=True)
        self._under_way = _Reduction(work, regions)
        self._changes_covered = self.conversion.changes
        self._requested = False
        if work is None:
            self.settle()

    def settle(self) -> None:
        """Wait for the reduction under way, if there is one, and write the scales in place."""
        if self._under_way is None:
            return
        work, regions = self._under_way
        if work is not None:
            work.wait()
        self._under_way = None
        with torch.inference_mode(mode=False), torch.no_grad():
            # Guests first: they may decide the scales of the weights.
            told = [(region, region.read(out, self._entries.amax)) for region, out in regions]
            self._entries.write_scales()
            self._findings = [*self._findings[-1:], Findings(self._entries.amax, self.shards, told)]
        self.generation += 1
        self._requests = 0

    def _tell(self, end: int | None) -> None:
        """Tell what reductions found, those before ``end``: of a later one it may still be on its way to the host."""
        findings, self._findings = self._findings[:end], self._findings[len(self._findings[:end]) :]
        for found in findings:
            found.tell()

    def settle_for_state_dict(self) -> None:
        """Reduce the regions that are due, if all ranks take or load a state dict now, and write what they make."""
        if self.regions_due and self._all_settle():
            self.reduce(tell=False)
        if self._regions:
            self.settle()

    def _all_settle(self) -> bool:
        """Whether all ranks came here since the last optimizer step; asked once, not for every layer."""
        ranks, step = self.layout.ranks, self.conversion.steps
        if len(ranks) == 1 or self._asked_at == step:
            return len(ranks) == 1
        self._asked_at = step
        if all_arrive(f"f8sub/{self.group_of(ranks).life}/settle/{step}", len(ranks)):
            return True
        warnings.warn(
            f"{self.shards[0].fqn}: a state dict was taken or loaded on some ranks only, after an optimizer step "
            "and before precompute_scales(model); it lacks what the amax histories saw in that step. Call "
            "precompute_scales(model) first, or take it on every rank",
            Float8Warning,
            stacklevel=2,
        )
        return False

    def gather_input(self, shard: Shard, source: Weight) -> tuple[torch.Tensor, str | None]:
        """One rank's bytes for the all-gather of one weight.

        Args:
            shard: the weight's shard.
            source: the tensor that FSDP2 gathers, see ``Shard.cast``.

        Returns:
            uint8 codes, and what ``resolve`` needs when the shard changed in a way that other ranks may not know
            of; None otherwise.
        """
        shard.gathers += 1
        if is_capturing(source):
            self._check_capture(shard)
            return shard.cast(source, self.generation), None
        if self.due:
            self._warn_missed()
            self.reduce()
        self.settle()
        stale = self._stale(shard)
        if stale and len(self.layout.sharers) == 1:
            self.reduce()
        if not (stale and self._stale(shard)):
            return shard.cast(source, self.generation), None
        ticket = self._place_of(shard.index, shard.gathers, dist.get_process_group_ranks(self.layout.group))
        tell(ticket)
        return shard.cast(source, self.generation, beyond_range=_RANGE_SLACK), ticket

    def resolve(self, shard: Shard, source: Weight, gathered: torch.Tensor, ticket: str) -> None:
        """Decide, after the all-gather, what a shard that changed unannounced meant; ``gathered`` is mended."""
        if gathered.is_cuda:
            torch.cuda.current_stream(gathered.device).synchronize()
        changed = all_told(ticket, self.layout.world)
        if changed and self.layout.world < len(self.layout.sharers):
            changed = all_arrive(self._place_of(shard.index, shard.gathers), len(self.layout.sharers))
        if not changed:
            if shard.stale and shard.master.numel():
                self._changed_alone.add(shard.index)
            return
        if self._stale(shard):
            self.reduce()
        self.settle()
        shard.wire.gather(shard.cast(source, self.generation), gathered)

    def _place_of(self, *what: object) -> str:
        """A name for what is under way, the same on all ranks and on none before them."""
        return "/".join(map(str, ("f8sub", self.group_of(self.layout.sharers).life, *what)))

    def group_of(self, ranks: tuple[int, ...]) -> OwnGroup:
        """A process group of these ranks that nothing else uses; all of them call this together at first."""
        if ranks not in self._groups:
            self._groups[ranks] = own_group(ranks, self.layout.device)
        return self._groups[ranks]

    def _stale(self, shard: Shard) -> bool:
        """Whether this rank knows of a change to the weight that the scales do not cover.

        An empty shard cannot show one (``dcp.load`` writes nothing to it), so it goes by the rank's other shards,
        and a rank that has none of any size always asks the others. Scales on the wire are always those of the codes.
        """
        if shard.wire.carries_scales:
            return False
        if self._requested or shard.stale or shard.shows_changes:
            return self._requested or shard.stale
        others = [other for other in self.shards if other.master.numel()]
        return len(self.layout.sharers) > 1 and (not others or any(other.stale for other in others))

    def _check_capture(self, shard: Shard) -> None:
        """A CUDA graph records casts alone: what ranks agree on and reduce happens between its replays.

        Raises:
            Float8ConfigError: something of that is left to do.
        """
        if self.state is not Freshness.FRESH or self.regions_due or self._stale(shard):
            raise Float8ConfigError(
                f"{shard.fqn}: a CUDA graph is captured while the scales of the weights are not in place yet; call "
                "precompute_scales(model), run the model once as it will be captured, and then capture it. After "
                "each optimizer step call precompute_scales(model) before the replay"
            )
        self._captured = True

    def _warn_missed(self) -> None:
        if self.generation == 0 or self._warned:
            return
        self._warned = True
        warnings.warn(
            "precompute_scales(model) was not called after the weights changed (optimizer.step() or "
            "load_state_dict); scales are computed before the next all-gather instead: right, but not overlapped "
            "with anything. Call f8sub.precompute_scales(model), or f8sub.register_precompute_hook(optimizer, model)",
            Float8Warning,
            stacklevel=2,
        )
