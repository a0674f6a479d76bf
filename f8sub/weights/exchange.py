"""Exchange: the amaxes of weights that the same ranks shard, reduced by one all-reduce, and the scales from them.

[Note: from an optimizer step to scales]

    every shard's amaxes, and the guests' regions -> one flat table -> all-reduce(MAX) -> scales, in place

- ``precompute_scales.py`` asks every exchange of a model for a reduction, and enters optimizer steps.
- The amax table (``amax_table.py``) is flat float32 memory. Shards and unsharded weights look at its parts, so that
  scales that are written there are theirs. What is wrong with the weights is told one reduction later.
- A region (``conversion.py``) is a feature's part of the table. Regions that are due ride along. Such a reduction is
  over all ranks that hold the layers, HSDP's replicas too. Any other one is over the ranks that shard the weights.

When the table is reduced is decided by what every rank knows, never by what one rank alone knows. An optimizer step, a
``load_state_dict`` and a call of precompute_scales are such things: a rank whose loss is NaN may leave them out.

- FSDP2 reduced gradients of the weights since the last reduction, as every rank knows: the exchange is ``open``. Then
  precompute_scales reduces without asking, and so does a rank that forgot it after a step, before its next all-gather.
  A process group of the exchange's own lets other collectives come between this one's begin and its end.
- The exchange is open, and the rank did neither: micro-batches, or a step that it left out. Before its next all-gather
  in a forward it asks over the store whether all ranks come to this point. If one does not, it is late or it reduces,
  so all that came reduce with it. No rank gathers before one of the two. With regions, which have to know of steps, a
  rank that did not step asks in precompute_scales too.
- The exchange is not open: the ranks agree over the store that all of them came to reduce.
- A CUDA graph is captured: all reduce, in each of its replays. ``graph_step`` does so when a step begins, so that no
  replay reads scales of weights from before a change.
- A shard changed in another way (an in-place operator, ``dcp.load``). One rank cannot know whether the others' did. So
  it tells the store, joins the all-gather as it is, and reads the store: every rank has passed the point where it would
  have told. If all did, all reduce, and gather this weight again. If not, the codes stand: those the old scale can hold
  are right, the others are NaN. Under tensor parallelism the ranks of all parts then agree over the store.
"""

import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from f8sub.capture import current_capture, is_capturing
from f8sub.errors import Float8ConfigError, Float8NumericsError, Float8Warning
from f8sub.kernels import chunk_cat
from f8sub.torch_compat import (
    after_reductions,
    copy_gradients,
    gather_in_place,
    gathered_of,
    graph_task,
    parameter_groups,
)
from f8sub.weights import large_casts
from f8sub.weights.agreement import PATIENCE, OwnGroup, all_announced, all_arrive, announce, own_group
from f8sub.weights.amax_table import AmaxTable, Findings
from f8sub.weights.layout import ShardLayout
from f8sub.weights.shard import Shard
from f8sub.weights.weight import Weight, WeightRecord

if TYPE_CHECKING:
    from f8sub.weights.conversion import Conversion, Region

_RANGE_SLACK = 1.0 + 2.0**-4
"""Codes cast with an older scale may exceed the format's range by this factor, half a step of e4m3's rounding."""

_APART = (
    "optimizer.step() or precompute_scales(model) was not called on rank {rank} after the last backward, but on "
    "another rank, or another rank is more than {seconds} s behind; this rank waited that long and computes scales "
    "with the others, so training goes on. Shards of one weight are then of different steps, as in high precision: "
    "decide on all ranks together whether to step, for example with dist.all_reduce of `loss.isfinite()`"
)

_MISSED = (
    "precompute_scales(model) was not called after the weights changed (optimizer.step() or load_state_dict); scales "
    "are computed before the next all-gather instead: right, but not overlapped with anything. Call "
    "f8sub.precompute_scales(model), or f8sub.register_precompute_hook(optimizer, model)"
)


_NEVER = -1
"""In place of a count: nothing was reduced, or asked, so far."""


class Exchange:
    """Reduces the amaxes of the weights that the same ranks shard; see the module's docstring for when.

    ``generation`` is the number of reductions whose scales are in place. ``raised`` is true from an error about NaN or
    infinity until a reduction finds none.
    """

    def __init__(self, conversion: "Conversion", layout: ShardLayout) -> None:
        self.conversion, self.layout = conversion, layout
        self.generation = 0
        self.table = AmaxTable([], {}, "cpu")
        self._watched: weakref.WeakSet[WeightRecord] = weakref.WeakSet()
        # FSDP2's groups, held weakly because they hold modules, and the shards that are gathered in each.
        self._gathered_in: list[tuple[weakref.ref[Any], list[Shard]]] = []
        self._groups: dict[tuple[int, ...], OwnGroup] = {}
        # A reduction that began and did not end. Whether scales are out of date is another matter: weights may change
        # while one is on its way, and then ``due`` and ``_under_way`` are both true.
        self._under_way: tuple[dist.Work | None, list[tuple[Region, torch.Tensor]]] | None = None
        # ``conversion.changes`` at the last reduction, or ``_NEVER``: what makes the scales fresh or due on every rank.
        self._changes_covered = _NEVER
        # FSDP2's reductions of gradients so far, and those at the last reduction: where they differ it is ``open``.
        self.opened = self._closed_at = 0
        # How often this rank asked the others since then. It numbers the points in the store.
        self._requests = 0
        # This rank asked and not all came: it knows of a change that the scales do not cover, whatever its shards say.
        self._requested = False
        # The change that was asked about before an all-gather, so that each is asked about once.
        self._asked = _NEVER, _NEVER, _NEVER
        # 1 + the index of a weight that changed on this rank and not on all: the next reduction tells the others.
        self._changed_alone = 0
        # A CUDA graph gathers these weights: its replays open nothing, ask nothing and need no warning.
        self._captured = False
        self._warned = self._warned_apart = False
        # The event after the last scales, and whether a capture recorded it: streams wait for those of their own kind.
        self._written: tuple[torch.cuda.Event, bool] | None = None
        self._findings: list[Findings] = []
        # The last reduction met NaN or infinity, and an error said so: the next one is read at once.
        self.raised = False

    def set_records(self, records: Sequence[WeightRecord]) -> None:
        """Lay out the table for these weights: shards of one rule side by side, in the same order on every rank."""
        shards = dict.fromkeys(record.shard for record in records if record.shard is not None)
        if any(shard.gathers for shard in shards):
            # Those read scales where they lie now.
            new = next((shard.fqn for shard in shards if not shard.gathers), records[-1].fqn)
            raise Float8ConfigError(
                f"{new}: its weight was sharded after other layers of the same model were trained or run; call "
                "fully_shard on every part of a model before its first forward"
            )
        self.settle()
        regions = {}
        for guest in self.conversion.guests:
            if (region := guest.region(records, self.table.regions.get(guest))) is not None:
                regions[guest] = region
        in_order = sorted(shards, key=lambda s: (*map(str, s.rule), s.fqn))
        self.table = AmaxTable(in_order, regions, self.layout.device)
        self._changes_covered = _NEVER
        sent = {(r.module, r.name): s for r in records if (s := r.shard) is not None and s.sent}
        self._gathered_in = [
            (weakref.ref(group), list(dict.fromkeys(shard for _, shard in params)))
            for group, params in parameter_groups(sent)
        ]
        self._watch(records)

    def _watch(self, records: Sequence[WeightRecord]) -> None:
        """Have FSDP2's reductions of these weights' gradients open the exchange."""
        # The hook lives as long as the module; it must not hold the exchange, whose table holds the shards.
        this = weakref.ref(self)

        def opens() -> None:
            if (exchange := this()) is not None:
                exchange.opened += 1
                exchange._requests = 0

        new = [record for record in records if record not in self._watched]
        self._watched.update(new)
        after_reductions({(record.module, record.name): opens for record in new})
        weights = [(record.module, record.name) for record in new]
        copy_gradients(weights, chunk_cat.runs_on, chunk_cat.copied)
        # Gloo gathers on the host, which hides nothing.
        gather_in_place(weights, takes=lambda device: device.type == "cuda", casts=large_casts.around)

    def in_use(self) -> set[Shard]:
        """Return the shards of weights that FSDP2 has gathered, or gathers now: they are read as they were cast."""
        groups = ((reference(), shards) for reference, shards in self._gathered_in)
        return {
            shard for group, of in groups if group is not None and any(gathered_of(group)) for shard in of
        }

    @property
    def gathers(self) -> bool:
        """True if FSDP2 gathers any of the weights as float8; else the exchange serves guests alone."""
        return any(shard.sent for shard in self.table.shards)

    @property
    def due(self) -> bool:
        """True if there is something to reduce, as this rank knows: the weights changed, or a region is due."""
        # Both sides only change in events that every rank has: optimizer steps, load_state_dict and reductions.
        return self._changes_covered != self.conversion.changes or self.regions_due

    @property
    def open(self) -> bool:
        """True if gradients were reduced since the last reduction, or since all ranks knew that none was due."""
        return self.opened != self._closed_at

    @property
    def _reduces_alone(self) -> bool:
        """True if this rank reduces without asking: every other one does, too, or asks before it gathers.

        A reduction by one that asked takes all regions along, and so does this one. Replays of a CUDA graph open
        nothing, and ask nothing.
        """
        # Every rank laid out the table in the same call, so all know that it was never reduced.
        if self._changes_covered == _NEVER or self._captured or len(self.layout.sharers) == 1:
            return self.due
        return self.open and self.due and all(region.due for region in self.table.regions.values())

    @property
    def regions_due(self) -> bool:  # noqa: D102
        return any(region.due for region in self.table.regions.values())

    @property
    def settles_at_once(self) -> bool:
        """True if ``request`` leaves nothing under way: on GPUs, where the current stream waits and the host does not.

        And with regions: histories are in state dicts that trainers take once and save later, as torchtitan 0.2 does.
        A CUDA graph may be captured next, as torchtitan 0.3 does after its first step, and a capture cannot wait for a
        collective that began outside of it. Nor can a replay.
        """
        return self.layout.device != "cpu" or len(self.table.regions) > 0

    def request(self) -> None:
        """Reduce now, on every rank that calls this, unless one of them does not."""
        if is_capturing(self.table.amax):
            if self.gathers:
                self.capture_reduction()
            return
        if not self.gathers:
            # All findings but the last are on the host by now, so nothing waits.
            self._report(-1)
            return
        self._requested = False
        # An open exchange without regions needs no question: ranks that forgot this call
        # reduce before their next all-gather.
        if self._reduces_alone or (self.open and not self.table.regions) or self._all_request():
            self.reduce()
        # Not all came in time, but those that stepped reduce without asking: join them, or they wait for ever.
        elif self.open:
            self._join()
        if self.settles_at_once:
            self.settle()

    def capture_reduction(self) -> None:
        """Capture a reduction in the graph, so that each replay reduces; ``before_capture`` was called."""
        if (capture := current_capture()) is None:
            raise RuntimeError(
                "a reduction is captured, and nobody is there to repeat what it reports to the host"
            )
        before = self._changes_covered, self.generation
        self._captured = True
        capture.if_it_fails(lambda: self._not_captured(*before))
        self.reduce(report=False, with_regions=True)
        self.settle()
        found = self._findings[-1]
        # What a replay finds is copied to the same host memory each time: read it before the next replay writes there.
        capture.before_replay(lambda: self._report(None))
        capture.after_replay(lambda: self._findings.append(found))
        capture.keep(self.table, self.table.whole)

    def expect_late_scales(self) -> None:
        """Stop warning of weights that changed without a reduction: ``graph_step`` reduces when a step begins."""
        self._warned = True

    def before_capture(self) -> None:
        """Finish what a graph could not wait for, and report what is known of the weights."""
        self.settle()
        self._report(None)
        self.table.before_capture()
        self._written = None

    def _not_captured(self, changes: int, generation: int) -> None:
        """Undo what ``capture_reduction`` noted on the host: a capture that failed ran nothing."""
        self._changes_covered, self.generation = changes, generation
        self._findings, self._under_way, self._written = [], None, None
        for shard in self.table.shards:
            shard.amax_of = shard.next_scales = None

    def _all_request(self) -> bool:
        """Return whether all ranks come to reduce, which none of them has to."""
        self._requests += 1
        point = "request", self.generation, self.opened, self._requests
        self._requested = not self.all_arrive(self.layout.sharers, *point)
        return not self._requested

    def _settle_pass(self) -> None:
        """Decide for all ranks of a forward, while the exchange is open and this rank saw no step.

        See the module's docstring.
        """
        ranks = self.layout.ranks if self.table.regions else self.layout.sharers
        if self.all_arrive(ranks, "pass", self.generation, self.opened):
            # All ranks came here before any stepped: no reduction is missing, so later
            # all-gathers of this pass need not ask.
            self._closed_at = self.opened
        else:
            self._join()

    def _join(self) -> None:
        """Reduce with ranks that do so without asking, or that ask and find that this one did not come."""
        if not self._warned_apart:
            self._warned_apart = True
            message = _APART.format(rank=dist.get_rank(), seconds=PATIENCE.seconds)
            warnings.warn(message, Float8Warning, stacklevel=1)
        for guest in self.conversion.guests:
            guest.stepped_elsewhere(
                [shard.master for shard in self.table.shards if shard.master.cell.is_trained]
            )
        self.reduce(with_regions=True)

    def reduce(self, *, report: bool = True, with_regions: bool = False) -> None:
        """Take every shard's amaxes now and start the all-reduce; ``settle`` computes the scales from it.

        Raises Float8NumericsError if the reduction before found NaN or infinity, and from then on at once, as long as
        they are there; ``report=False`` leaves that for later. Regions that are due ride along, or all of them.
        """
        self.settle()
        if report:
            error = self._error(None)
            if error is not None or self.raised:
                # A caller that caught the error may have repaired the weights since, which these amaxes show.
                self._reduce(with_regions)
                self.settle()
                now = self._error(None)
                self.raised = now is not None
                if (error := error or now) is not None:
                    raise error
                return
        self._reduce(with_regions)

    def _reduce(self, with_regions: bool) -> None:
        """Take the amaxes and start the all-reduce."""
        table, layout = self.table, self.layout
        regions = [
            pair
            for pair in zip(table.regions.values(), table.parts, strict=True)
            if with_regions or pair[0].due
        ]
        # Regions hold what replicas saw too, such as amaxes of activations; the weights'
        # amaxes are equal on all replicas.
        reduced, ranks = (table.whole, layout.ranks) if regions else (table.amax, layout.sharers)
        work = None
        with torch.inference_mode(mode=False), torch.no_grad():
            table.take_amaxes()
            if self._changed_alone:
                # The lane: MAX keeps the largest index, so one reduction names one weight.
                table.amax[-1] = self._changed_alone
                self._changed_alone = 0
            for region, out in regions:
                region.write(out)
            if len(ranks) > 1:
                group = self.group_of(ranks).of_next_call()
                work = dist.all_reduce(reduced, dist.ReduceOp.MAX, group=group, async_op=True)
        self._under_way = work, regions
        self._changes_covered = self.conversion.changes
        self._requested, self._closed_at = False, self.opened
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
            told = [(region, region.read(out, self.table.amax)) for region, out in regions]
            self.table.write_scales({shard for shard in self.in_use() if shard.is_cast_again})
            if self.table.amax.is_cuda:
                # FSDP2 casts on streams of its own: they wait for this event before they read the scales.
                event = torch.cuda.current_stream(self.table.amax.device).record_event()
                self._written = event, is_capturing(self.table.amax)
            # At most two: the last one may still be on its way to the host.
            self._findings = [*self._findings[-1:], Findings(self.table, told)]
        self.generation += 1
        self._requests = 0

    def _error(self, end: int | None) -> Float8NumericsError | None:
        """Return the first error of reductions before ``end``: a later one may still be on its way to the host."""
        findings, self._findings = self._findings[:end], self._findings[len(self._findings[:end]) :]
        errors = [found.error() for found in findings]
        return next((error for error in errors if error is not None), None)

    def _report(self, end: int | None) -> None:
        """Raise the error of reductions before ``end``, if there is one."""
        if (error := self._error(end)) is not None:
            self.raised = self.gathers  # or no reduction of weights follows that would tell
            raise error

    def gather_input(self, shard: Shard, source: Weight) -> tuple[torch.Tensor, str | None]:
        """Return one rank's uint8 data for the all-gather of one weight, and a ticket for ``resolve`` or None.

        There is a ticket where the shard changed in a way that other ranks may not know of. ``source`` is as in
        ``Shard.pending``.
        """
        shard.gathers += 1
        if is_capturing(source):
            self._captured = True
            self._check_capture(shard)
            self._wait_for_scales(captured=True)
            return shard.pending(source), None
        if self._comes_to_reduce():
            self.reduce()
        self.settle()
        self._wait_for_scales(captured=False)
        stale = self._stale(shard)
        # No other rank has a part of these weights: nobody has to agree.
        if stale and len(self.layout.sharers) == 1:
            self.reduce()
        if not (stale and self._stale(shard)):
            return shard.pending(source), None
        ranks = dist.get_process_group_ranks(self.layout.group)
        ticket = self._place_of(self.layout.sharers, self.table.shards.index(shard), shard.gathers, ranks)
        # Before the all-gather, which therefore ends after all ranks told: ``resolve`` reads a final count.
        announce(ticket)
        # Cast at once, with the old scales: if another rank did not change, these data stand.
        shard.was_cast()
        return shard.layout.stacked(shard.cast(source, beyond_range=_RANGE_SLACK)), ticket

    def _wait_for_scales(self, *, captured: bool) -> None:
        """Have the current stream wait for the scales: FSDP2's own may only wait for an optimizer's step."""
        if self._written is not None and self._written[1] == captured:
            torch.cuda.current_stream(self.table.amax.device).wait_event(self._written[0])
            self._written = None

    def _comes_to_reduce(self) -> bool:
        """Return whether to reduce before an all-gather, because precompute_scales did not."""
        # In backward a gather is FSDP2's second of the same pass: the forward's decided already.
        in_backward = graph_task() != -1
        if self.open and not in_backward and not self._reduces_alone:
            self._settle_pass()
            return False
        change = self.generation, self.opened, self.conversion.changes
        if not self.due or self._asked == change:
            return False
        if self.generation and not (self._warned or self._captured):
            self._warned = True
            warnings.warn(_MISSED, Float8Warning, stacklevel=1)
        # An optimizer that steps in backward does so on every rank, between the same two all-gathers.
        if in_backward or self._reduces_alone:
            return True
        self._asked = change  # once: without the others it is each weight's own matter
        return self._all_request()

    def resolve(self, shard: Shard, source: Weight, gathered: torch.Tensor, ticket: str) -> None:
        """Decide, after the all-gather, what a shard that changed unannounced meant, and correct ``gathered``."""
        if gathered.is_cuda:
            # The count in the store is final once the all-gather ended, which on a GPU the host has to wait for.
            torch.cuda.current_stream(gathered.device).synchronize()
        index, sharers = self.table.shards.index(shard), self.layout.sharers
        changed = all_announced(ticket, self.layout.world)
        if changed and self.layout.world < len(sharers):
            # Ranks of other tensor-parallel parts take part in the reduction and not in this all-gather: ask them too.
            changed = self.all_arrive(sharers, index, shard.gathers)
        if not changed:
            if shard.stale and shard.master.numel():
                self._changed_alone = max(self._changed_alone, 1 + index)
            return
        if self._stale(shard):
            self.reduce()
        self.settle()
        # Gather once more, with the scales of the weight as it is now, into the memory that FSDP2 reads next.
        shard.wire.gather(shard.cast(source), gathered)
        shard.use_next_scales()

    def all_arrive(self, ranks: tuple[int, ...], *what: object) -> bool:
        """Return whether all of these ranks come to a point, for the first time; see ``agreement.py``."""
        return len(ranks) == 1 or all_arrive(self._place_of(ranks, *what), len(ranks))

    def _place_of(self, ranks: tuple[int, ...], *what: object) -> str:
        """Return a name for what is under way, the same on all ranks and on none before them."""
        return "/".join(map(str, ("f8sub", self.group_of(ranks).life, *what)))

    def group_of(self, ranks: tuple[int, ...]) -> OwnGroup:
        """Return a process group of these ranks that nothing else uses; all of them call this together at first."""
        if ranks not in self._groups:
            self._groups[ranks] = own_group(ranks, self.layout.device)
        return self._groups[ranks]

    def _stale(self, shard: Shard) -> bool:
        """Return whether this rank knows of a change to the weight that the scales do not cover.

        An empty shard cannot show one (``dcp.load`` writes nothing to it), so it goes by the rank's other shards, and a
        rank that has none of any size always asks the others. Scales on the wire are always those of the data beside
        them.
        """
        if shard.wire.carries_scales:
            return False
        if self._requested or shard.stale or shard.shows_changes:
            return self._requested or shard.stale
        others = [other for other in self.table.shards if other.master.numel()]
        return len(self.layout.sharers) > 1 and (not others or any(other.stale for other in others))

    def _check_capture(self, shard: Shard) -> None:
        """Raise Float8ConfigError if something is left to reduce: a CUDA graph records casts alone."""
        if self.due or self._under_way is not None or self._stale(shard):
            raise Float8ConfigError(
                f"{shard.fqn}: a CUDA graph is captured while the scales of the weights are not in place yet; call "
                "precompute_scales(model), run the model once as it will be captured, and then capture it. After "
                "each optimizer step call precompute_scales(model) before the replay. In torchtitan leave "
                "precompute_float8_dynamic_scale_for_fsdp on, or give --training.disable_cuda_graphs"
            )
