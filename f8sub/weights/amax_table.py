"""AmaxTable: where the amaxes of many weights lie for one all-reduce, and the scales that are made of them."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from f8sub.kernels.scales import PriorScale, scales_or_nan
from f8sub.kernels.triton import shard_amaxes, support
from f8sub.weights.findings import sent_to
from f8sub.weights.shard import Shard

if TYPE_CHECKING:
    from f8sub.kernels.triton.launcher import Launch

_SLOT = 4
"""A weight's part of the table begins at a multiple of 16 bytes: cuBLASLt reads no scale that lies elsewhere."""


class AmaxTable:
    """Flat float32 memory, the same on every rank, whose parts the shards and the unsharded weights look at.

    Args:
        shards: weights of one format, margin and dtype side by side.
        regions: number of entries of each guest's region.
        device: type of the device that gathers.

    Attributes:
        whole: all that is reduced when regions are due: ``amax`` and then ``parts``.
        amax: the weights' amaxes, infinity for one that is not finite, and last a lane: 1 + the index of a weight
            that changed on some ranks only.
        parts: of the regions.
    """

    def __init__(self, shards: Sequence[Shard], regions: Sequence[int], device: str) -> None:
        self._shards = shards
        self._look_for(shards)
        self._places: list[Any] | None = None
        self._launches: list[Launch] = []
        self.group_by_rule()
        sizes = [rows * cols for rows, cols in (shard.table_shape for shard in shards)]
        slots = [size + -size % _SLOT for size in sizes]
        with torch.inference_mode(mode=False):
            parts = [sum(slots) + 1, *regions]
            self.whole = torch.zeros(sum(parts), dtype=torch.float32, device=device)
            self.amax, *self.parts = self.whole.split(parts)
            self._scale = torch.ones(sum(slots), dtype=torch.float32, device=device)
            self._scale_inv = torch.ones_like(self._scale)
            start = 0
            for index, (shard, size) in enumerate(zip(shards, sizes, strict=True)):
                shard.index = index
                flat = (self.amax, self._scale, self._scale_inv)
                shard.lay_out(*(part[start : start + size] for part in flat))
                start += slots[index]

    def group_by_rule(self) -> None:
        """Find the weights side by side whose scales are made alike."""
        from_table = [shard for shard in self._shards if not shard.wire.carries_scales]
        runs = itertools.groupby(from_table, key=lambda s: s.rule)
        self._runs = [list(run) for _, run in runs]

    def take_amaxes(self) -> None:
        """Write the amaxes of this rank's shards as they are now; 0 where it has no part of a tile."""
        self.amax.zero_()
        if support.takes(self.amax):
            self._take_together()
        if whole := [shard for shard in self._tensorwise if shard.master.numel()]:
            with torch._C._DisableTorchDispatch():
                amaxes = torch._foreach_norm([shard.master for shard in whole], torch.inf)
            all_of_it = len(whole) * _SLOT == len(self.amax) - 1
            where = slice(0, -1, _SLOT) if all_of_it else self._positions(whole)
            self.amax[where] = torch.stack(amaxes).float()
        for shard in self._finer:
            shard.write_amax()
        for shard in self._shards:
            shard.mark_scaled()
        if self._tensorwise or self._finer:
            self.amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)

    def _take_together(self) -> None:
        """Take the amaxes that a launch over many shards can take; which it is, is kept while they stay in place."""
        masters = [shard.master for shard in self._shards]
        places = [(master.data_ptr(), master.shape, master.stride()) for master in masters]
        if places != self._places:
            matrices = {shard: shard.in_table for shard in self._shards if shard.master.numel()}
            taken = {shard: m for shard, m in matrices.items() if shard_amaxes.takes(m, self.amax.device)}
            self._launches = shard_amaxes.amaxes(list(taken.values()), self.amax)
            self._look_for([shard for shard in matrices if shard not in taken])
            self._places = places
        if self._launches:
            with support.device_of(self.amax):
                for launch in self._launches:
                    launch.run()

    def _look_for(self, shards: Sequence[Shard]) -> None:
        """Take the amaxes of these shards by torch's operators."""
        self._tensorwise = [s for s in shards if s.wire.table_tile.is_whole]
        self._finer = [s for s in shards if not s.wire.table_tile.is_whole]

    def _positions(self, shards: list[Shard]) -> torch.Tensor:
        return sent_to(self.amax.device, [int(shard.amax.storage_offset()) for shard in shards])

    def write_scales(self) -> None:
        """Make the scales of the reduced amaxes, in place."""
        for shards in self._runs:
            self._write_scales(shards)
        for shard in self._shards:
            shard.scales_written()

    def _write_scales(self, shards: list[Shard]) -> None:
        """Make the scales of weights of one format and dtype, which lie side by side in the table."""
        if shards[0].format.scale_rule.stored_as != torch.float32:
            for shard in shards:
                self._write(shard, shard.amax, shard.scale, shard.scale_inv, None)
            return
        first, last = shards[0].amax, shards[-1].amax
        part = slice(first.storage_offset(), last.storage_offset() + last.numel())
        prior = _side_by_side([shard.prior() for shard in shards if shard.prior is not None])
        self._write(shards[0], self.amax[part], self._scale[part], self._scale_inv[part], prior)

    def _write(
        self,
        shard: Shard,
        amax: torch.Tensor,
        scale: torch.Tensor,
        scale_inv: torch.Tensor,
        prior: PriorScale | None,
    ) -> None:
        if shard_amaxes.takes_amaxes(amax, shard.format, shard.dtype):
            with support.device_of(amax):
                shard_amaxes.scales(amax, prior, scale, scale_inv, shard.format, shard.dtype).run()
            return
        # Rounding keeps order, so the rounded amax is the amax of the rounded weight.
        rounded = amax.to(shard.dtype).float()
        made = scales_or_nan(rounded, shard.format, prior)
        scale.copy_(made.scale)
        with _unsafe_preserve_version_counter(scale_inv):
            scale_inv.copy_(made.scale_inv)
        if shard.global_scale_inv is not None and made.global_scale_inv is not None:
            with _unsafe_preserve_version_counter(shard.global_scale_inv):
                shard.global_scale_inv.copy_(made.global_scale_inv)


def _side_by_side(priors: Sequence[PriorScale]) -> PriorScale | None:
    """The prior scales of weights that lie side by side in the table, where zeros are between; None of none."""
    if not priors:
        return None
    scales = torch.cat([prior.scale.view(1) for prior in priors])
    spread = scales.new_zeros((len(priors) - 1) * _SLOT + 1)
    spread[::_SLOT] = scales
    return PriorScale(spread, priors[0].margin, priors[0].covers)
