"""AmaxTable: the amaxes of many weights side by side, for one all-reduce; their scales; and errors in them."""

import contextlib
import functools
import itertools
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from f8sub.capture import current_capture, host_copy
from f8sub.errors import Float8NumericsError, Float8Warning
from f8sub.host_copy import constant
from f8sub.kernels.scales import PriorScale, scales_or_nan
from f8sub.kernels.triton import multi_tensor_launch, support
from f8sub.torch_compat import no_torch_dispatch, preserve_version_counter
from f8sub.weights.shard import FoundAmaxes, KnownAmax, Shard, TableScales
from f8sub.weights.weight import is_raw, written_raw

if TYPE_CHECKING:
    from f8sub.kernels.triton.launch import Launch
    from f8sub.weights.conversion import Guest, Region

_FEW = 8192  # elements; on a CPU ``_foreach_norm`` takes 2.8 ns for each, and larger weights are faster one by one

_SLOT = 4
"""A weight's part of the table begins at a multiple of 16 bytes: cuBLASLt reads no scale that lies elsewhere."""


_MOST = 8
"""Sets of known shards whose launches are kept; a training loop has two, none and all that its optimizer steps."""


class _Ways(NamedTuple):
    """How the amaxes of some shards are taken: by kernels, by one operator for all, or one by one.

    ``places`` are where the shards lay when this was worked out; empty where no kernel runs.
    """

    places: list[Any]
    launches: "list[Launch]"
    tensorwise: list[Shard]
    apart: list[Shard]


class AmaxTable:
    """Flat float32 memory, the same on every rank, whose parts the shards and the unsharded weights look at.

    ``whole`` is ``amax`` and then the ``parts`` of the guests' regions. ``amax`` are the weights' amaxes, those of one
    ``Shard.rule`` side by side, infinity for one that is not finite; and as the last entry a lane: 1 + the index of a
    weight that changed on some ranks only.
    """

    def __init__(self, shards: Sequence[Shard], regions: "Mapping[Guest, Region]", device: str) -> None:
        self.shards, self.regions = shards, regions
        self._ways: dict[frozenset[Shard], _Ways] = {}
        # Those that may have ``next_scales``.
        self._waiting: Collection[Shard] = ()
        self.group_by_rule()
        sizes = [rows * cols for rows, cols in (shard.table_shape for shard in shards)]
        slots = [size + -size % _SLOT for size in sizes]
        with torch.inference_mode(mode=False):
            # One more entry for the lane of a weight that changed on some ranks only.
            parts = [sum(slots) + 1, *(region.size for region in regions.values())]
            self.whole = torch.zeros(sum(parts), dtype=torch.float32, device=device)
            self.amax, *self.parts = self.whole.split(parts)
            self._by_kernels = support.takes(self.amax)
            self._scale = torch.ones(sum(slots), dtype=torch.float32, device=device)
            self._scale_inv = torch.ones_like(self._scale)
            # Each shard gets views of the three tensors. Scales that are written to the table are the shard's at once.
            starts = itertools.accumulate(slots, initial=0)
            for shard, start, size in zip(shards, starts, sizes, strict=False):
                flat = (self.amax, self._scale, self._scale_inv)
                shard.lay_out(*(part[start : start + size] for part in flat))

    def group_by_rule(self) -> None:
        """Find runs of neighbouring weights whose scales are computed by one rule, and so by one launch."""
        # Scales that are sent with the data are computed by the cast, from the shard alone.
        from_table = (shard for shard in self.shards if not shard.wire.carries_scales)
        self._runs = [list(run) for _, run in itertools.groupby(from_table, key=lambda s: s.rule)]

    def take_amaxes(self) -> None:
        """Write the amaxes of this rank's shards as they are now; 0 where it has no part of a tile.

        While a graph is captured those are not read that the last step found: each replay takes what the replay before
        found, and a shard that was written to in between is read before it.
        """
        # Zero is neutral in the all-reduce(MAX): a rank adds nothing to tiles that it holds no part of.
        self.amax.zero_()
        ways = self._ways_of(self._take_known())
        with support.device_of(self.amax) if ways.launches else contextlib.nullcontext():
            for launch in ways.launches:
                launch.run()
        if whole := [shard for shard in ways.tensorwise if shard.master.numel()]:
            # All weights have one amax: their entries are every _SLOT-th, and a strided write needs no index tensor.
            where: slice | torch.Tensor = slice(0, -1, _SLOT)
            if len(whole) * _SLOT != len(self.amax) - 1:
                where = constant(self.amax.device, [int(s.scales.amax.storage_offset()) for s in whole])
            self.amax[where] = _amaxes_of(whole)
        for shard in ways.apart:
            shard.write_amax()
        for shard in self.shards:
            shard.amax_of = shard.master.state  # from here on a write to the weight shows as stale
        if ways.tensorwise or ways.apart:
            # NCCL's and gloo's MAX may drop a NaN. Infinity survives it, and stands for both.
            # Kernels write infinity themselves.
            self.amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)

    def _take_known(self) -> frozenset[Shard]:
        """Take the amaxes that the step found which wrote the shards; return the shards that are so still."""
        known, capture = self._known(), current_capture()
        for found, entries in _by_step(known).items():
            to, where = self._places_of(found, entries)
            self.amax[to] = found.amaxes[where]
            if capture is not None:
                capture.keep(to, where)
                capture.before_replay(functools.partial(_read_what_changed, found, entries))
        return frozenset(known)

    def _known(self) -> dict[Shard, KnownAmax]:
        """Return the shards whose amaxes the last step found, and nobody wrote to since."""
        shards = [shard for shard in self.shards if shard.known is not None]
        return {shard: known for shard in shards if (known := shard.amax_now) is not None}

    def _places_of(
        self, found: FoundAmaxes, entries: Mapping[Shard, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the entries of shards in the table, and in the tensor that has their amaxes; int64."""
        to = [place for shard in entries for place in shard.entries]
        return constant(self.amax.device, to), _places_in(found, entries.values())

    def before_capture(self) -> None:
        """Send to the device what a captured ``take_amaxes`` reads there: a capture sends nothing."""
        known = self._known()
        self._ways_of(frozenset(known))
        for found, entries in _by_step(known).items():
            self._places_of(found, entries)

    def _ways_of(self, known: frozenset[Shard]) -> "_Ways":
        """Return how the amaxes of all shards are taken but those that are known; kept while the shards stay put."""
        takes = self._by_kernels
        masters = [shard.master for shard in self.shards] if takes else []
        # Launches hold addresses: FSDP2 moves a shard when it pads it, and CPU offload or ``to`` when they move it.
        places = [(m.data_ptr(), m.dtype, m.shape, m.stride()) for m in masters]
        ways = self._ways.get(known)
        if ways is None or ways.places != places:
            left = [shard for shard in self.shards if shard not in known]
            launches: list[Launch] = []
            if takes:
                matrices = {shard: shard.in_table for shard in left if shard.master.numel()}
                by_kernel = {
                    shard: m
                    for shard, m in matrices.items()
                    if multi_tensor_launch.takes(m, self.amax.device)
                }
                launches = multi_tensor_launch.amaxes(list(by_kernel.values()), self.amax)
                left = [shard for shard in matrices if shard not in by_kernel]
            # What no kernel takes is left to torch's operators.
            few = (s for s in left if s.master.numel() <= _FEW or not s.master.is_cpu)
            tensorwise = [s for s in few if s.wire.table_tile.is_whole]
            ways = _Ways(places, launches, tensorwise, [s for s in left if s not in tensorwise])
            if len(self._ways) >= _MOST:
                self._ways.clear()
            self._ways[known] = ways
        if (capture := current_capture()) is not None:
            # A graph replays the addresses in these launches' tables: they live as long as the graph.
            capture.keep(ways.launches)
        return ways

    def write_scales(self, in_use: Collection[Shard] = ()) -> None:
        """Compute the scales from the reduced amaxes, in place.

        FSDP2 has the weights ``in_use`` gathered, cast with the scales from before. They are read with those until they
        are gathered again, see ``Shard.next_scales``.
        """
        # No scale that is read meanwhile is written, for a moment neither: this may run on a stream of FSDP2's own.
        scale_inv = torch.empty_like(self._scale_inv) if in_use else self._scale_inv
        for shard in self._waiting:
            if shard.next_scales is not None and shard.next_scales.cast:
                shard.use_next_scales()  # of data that are on their way now
            shard.next_scales = None
        self._waiting = in_use
        for shards in self._runs:
            # Scales of another dtype lie outside the table's float32 memory, so each
            # weight's are written by themselves.
            if shards[0].format.scale_rule.stored_as != torch.float32:
                for shard in shards:
                    self._write(shard, shard.scales_beside() if shard in in_use else shard.scales, None)
                continue
            first, last = shards[0].scales.amax, shards[-1].scales.amax
            # Neighbours of one rule are one piece of memory, gaps included.
            part = slice(first.storage_offset(), last.storage_offset() + last.numel())
            priors = [shard.prior() for shard in shards if shard.prior is not None]
            prior = _side_by_side(priors, _SLOT, int(part.stop - part.start)) if priors else None
            entries = self.amax[part], self._scale[part], scale_inv[part]
            self._write(shards[0], TableScales(*entries, entries[2], None), prior)
            for shard in shards if in_use else ():
                shard.take_scales(scale_inv, later=shard in in_use)
        for shard in self.shards:
            if shard.copies_scales and shard.next_scales is None:
                shard.scales_written()

    def _write(self, shard: Shard, entries: TableScales, prior: PriorScale | None) -> None:
        """Compute the scales of entries, of one weight or of neighbours, by the rule of ``shard``."""
        amax, scale, scale_inv, _, of_all = entries
        if self._by_kernels and multi_tensor_launch.takes_amaxes(amax, shard.format, shard.dtype):
            with support.device_of(amax):
                multi_tensor_launch.scales(amax, prior, scale, scale_inv, shard.format, shard.dtype).run()
            return
        # Rounding keeps order, so the rounded amax is the amax of the rounded weight.
        rounded = amax.to(shard.dtype).float()
        # An amax of infinity, which stands for NaN too, gives a scale of NaN: the data
        # become NaN on every rank at once.
        made = scales_or_nan(rounded, shard.format, prior)
        scale.copy_(made.scale)
        for entry, value in ((scale_inv, made.scale_inv), (of_all, made.global_scale_inv)):
            if entry is not None and value is not None:
                # Autograd saved these scales with the forward's operands, and an in-place
                # write would make backward raise.
                with preserve_version_counter(entry):
                    entry.copy_(value)


def _by_step(known: Mapping[Shard, KnownAmax]) -> dict[FoundAmaxes, dict[Shard, int]]:
    """Return the shards whose amaxes the steps of each optimizer found, and the entries of those."""
    by_step: dict[FoundAmaxes, dict[Shard, int]] = {}
    for shard, (found, entry, _) in known.items():
        by_step.setdefault(found, {})[shard] = entry
    return by_step


def _read_what_changed(found: FoundAmaxes, taken: Mapping[Shard, int]) -> None:
    """Write the amaxes of shards that were written to since the last step to where the next replay takes them."""
    if changed := found.written_to(taken):
        where = _places_in(found, [taken[shard] for shard in changed])
        whole = [shard for shard in changed if shard.wire.table_tile.is_whole]
        of_whole = dict(zip(whole, _amaxes_of(whole).split(1) if whole else (), strict=True))
        amaxes = [of_whole[shard] if shard in of_whole else shard.amaxes() for shard in changed]
        found.amaxes[where] = torch.cat(amaxes).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _places_in(found: FoundAmaxes, entries: Iterable[int]) -> torch.Tensor:
    return constant(found.amaxes.device, [place for entry in entries for place in found.places(entry)])


def _amaxes_of(shards: list[Shard]) -> torch.Tensor:
    """Read the largest magnitude of each of some shards that have elements; float32, (len(shards),)."""
    if raw := [shard for shard in shards if is_raw(shard.master)]:
        raise written_raw(raw[0].fqn, raw[0].master.dtype)
    with no_torch_dispatch():
        amaxes = torch._foreach_norm([shard.master for shard in shards], torch.inf)
    return torch.stack(amaxes).float()


class Findings:
    """Holds what a reduction met: NaN and infinity, weights that changed on some ranks, and what regions ``read``."""

    def __init__(self, table: AmaxTable, told: "Sequence[tuple[Region, torch.Tensor]]") -> None:
        amax = table.amax
        # One float32 tensor [is not finite | lane | regions], copied without waiting;
        # ``error`` reads it a reduction later.
        self._copy = host_copy(torch.cat([amax[:-1].isinf(), amax[-1:], *(found for _, found in told)]))
        self._sizes = [len(amax) - 1, 1, *(len(found) for _, found in told)]
        self._shards, self._regions = table.shards, [region for region, _ in told]

    def error(self) -> Float8NumericsError | None:
        """Warn of what is no error; return the error that names the layers, the same on every rank, or None."""
        found = self._copy.read()
        # The usual case: one look at host memory, and no text is made.
        if not found.any():
            return None
        weights, lane, *of_regions = found.split(self._sizes)
        if (alone := int(lane)) > 0:
            warnings.warn(
                f"{self._shards[alone - 1].fqn}: its weight changed on some ranks and not on others since scales "
                "were computed; the ranks gathered it with the scales from before the change, and what those could "
                "not hold as NaN, or as the largest code of a format without NaN. Change a sharded weight on every "
                "rank, then call precompute_scales(model)",
                Float8Warning,
                stacklevel=5,
            )
        entries = [(shard.fqn, shard.scales.amax) for shard in self._shards]
        bad = [fqn for fqn, amax in entries if weights[amax.storage_offset() :][: amax.numel()].any()]
        messages = [bad_weights(bad, "on this or another rank")] if bad else []
        for region, of_region in zip(self._regions, of_regions, strict=True):
            messages += region.report(of_region) if of_region.any() else []
        return Float8NumericsError(". ".join(messages)) if messages else None


def bad_weights(fqns: Sequence[str], where: str) -> str:
    """Return the text of the error for NaN or infinity in the weights of these layers."""
    return (
        f"NaN or infinity in the master weight of {', '.join(fqns)} ({where}) when scales were last computed; its "
        "float8 codes have been NaN since. Restore the weights from a checkpoint, and look at the gradients of the "
        "optimizer step before: gradient norm, learning rate, loss scale"
    )


def _side_by_side(priors: Sequence[PriorScale], multiple: int, size: int) -> PriorScale:
    """Join several prior scales, each padded with zeros to a multiple of so many entries; ``size`` entries in all."""
    scales = [each.scale.reshape(-1) for each in priors]
    gaps = {length: scales[0].new_zeros(-length % multiple) for length in set(map(len, scales))}
    filled = [part for scale in scales for part in (scale, gaps[len(scale)])]
    return PriorScale(torch.cat(filled)[:size], priors[0].margin, priors[0].covers)
