"""DroppedShard: the codes of a sharded weight whose high-precision values were dropped."""

import dataclasses

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from f8sub.formats import Operand, Tile
from f8sub.kernels import reference
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.shard import Shard
from f8sub.weights.weight import Weight


class DroppedShard(Shard):
    """A shard that keeps its codes, and the scales they were cast with, in place of the master."""

    _shape: torch.Size
    _kept: list[torch.Tensor]

    @property
    def stale(self) -> bool:
        """Never: the codes are the weight."""
        return False

    @property
    def shows_changes(self) -> bool:
        """There are none."""
        return True

    @classmethod
    def of(cls, shard: Shard) -> "DroppedShard":
        """Make ``shard`` itself one, right after its codes were gathered."""
        dropped = shard
        dropped.__class__ = cls
        if not isinstance(dropped, DroppedShard) or dropped._wire is None:
            raise RuntimeError(f"{shard.fqn}: a master is dropped only after its codes were gathered")
        dropped._shape = shard.values.shape
        dropped._kept = [scales.clone() for scales in dropped._scales]
        dropped.master = MasterWeight(shard.master.plain.new_empty(0, shard.layout.shape[1]))
        return dropped

    def cast(self, source: Weight, generation: int, *, beyond_range: float | None = None) -> torch.Tensor:
        """The codes that were kept."""
        return self._held

    def scales_written(self) -> None:
        """Write back the scales that the codes were cast with, over those that were just made."""
        for scales, kept in zip(self._scales, self._kept, strict=True):
            with _unsafe_preserve_version_counter(scales):
                scales.copy_(kept)
        super().scales_written()

    def dequantize(self) -> torch.Tensor:
        """float32 values of the codes, in the shard's shape."""
        rows = self._held[: self._shape[0]]
        codes = rows[:, : self._shape[1] // self.format.codes_per_byte].view(self.format.dtype)
        if self.wire.carries_scales:
            return reference.dequantize(Operand(codes, self.wire.scales_of(rows), self.format), torch.float32)
        # Tiles of the whole weight need not begin where the shard does: a scale for each element.
        scale_inv = reference.spread(
            self.scales.scale_inv.float(), self.format.tile, self._shape, self.layout.offset
        )
        format = dataclasses.replace(self.format, tile=Tile(1, 1))
        operand = Operand(codes, scale_inv.expand(self._shape), format, self.scales.global_scale_inv)
        return reference.dequantize(operand, torch.float32)

    @property
    def _held(self) -> torch.Tensor:
        if self._wire is None:
            raise RuntimeError(f"{self.fqn}: its codes were let go with its master")
        return self._wire

    @property
    def _scales(self) -> list[torch.Tensor]:
        scales = self.scales
        return [s for s in (scales.scale, scales.scale_inv, scales.global_scale_inv) if s is not None]
