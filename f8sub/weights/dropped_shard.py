"""Codes of a sharded weight that has no high-precision values: DroppedShard, and LoadedCodes before there is one."""

import dataclasses

import torch

from f8sub.formats import Operand, Tile
from f8sub.kernels import reference
from f8sub.kernels.scales import first_tile
from f8sub.torch_compat import preserve_version_counter
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.shard import Shard
from f8sub.weights.weight import Weight


class DroppedShard(Shard):
    """A shard that keeps its codes, and the scales they were cast with, in place of the master."""

    _shape: torch.Size
    _kept: list[torch.Tensor]
    _codes: torch.Tensor

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
        with torch.inference_mode(mode=False):  # a forward in inference mode may be the first after a drop
            codes = shard.cast(shard.master).to(shard.layout.device)
            dropped = cls._made_of(shard, shard.values.shape)
            dropped._codes = codes
            dropped._kept = [scales.clone() for scales in dropped._scales]
        dropped.master = MasterWeight(shard.master.plain.new_empty(0, shard.layout.shape[1]))
        return dropped

    @classmethod
    def _made_of(cls, shard: Shard, shape: torch.Size) -> "DroppedShard":
        dropped = shard
        dropped.__class__ = cls
        if not isinstance(dropped, DroppedShard):
            raise RuntimeError(f"{shard.fqn}: a {type(shard).__name__} cannot hold codes alone")
        dropped._shape, dropped.copies_scales = shape, True
        return dropped

    def pending(self, source: Weight) -> torch.Tensor:
        """The codes that were kept."""
        return self.layout.stacked(self._codes)

    def cast(self, source: Weight, *, beyond_range: float | None = None) -> torch.Tensor:
        """The codes that were kept."""
        return self._codes

    def lay_out(self, amax: torch.Tensor, scale: torch.Tensor, scale_inv: torch.Tensor) -> None:
        """Take its entries of the table, with the scales of the codes in them from the beginning."""
        super().lay_out(amax, scale, scale_inv)
        self.copies_scales = True
        self.scales_written()

    def scales_written(self) -> None:
        """Write back the scales that the codes were cast with, over those that were just made."""
        for scales, kept in zip(self._scales, self._kept, strict=bool(self._kept)):
            with preserve_version_counter(scales):
                scales.copy_(kept)
        super().scales_written()

    def dequantize(self) -> torch.Tensor:
        """float32 values of the codes, in the shard's shape."""
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
    """A rank's part of codes as a checkpoint has them, until FSDP2 asks for the weight.

    Args:
        operand: ``data`` of this rank's part, and the scales of the whole weight.
        offset: (row, column) in the whole weight at which the part begins.
    """

    def __init__(self, operand: Operand, offset: tuple[int, int]) -> None:
        self._operand, self._offset = operand, offset
        self.master = MasterWeight(operand.data.new_empty((0, operand.shape[1]), dtype=torch.float32))

    def dequantize(self) -> torch.Tensor:
        """float32 values of the codes."""
        return _part_dequantized(self._operand, torch.Size(self._operand.shape), self._offset)

    def given_to(self, shard: Shard) -> DroppedShard:
        """Make ``shard`` itself hold the codes, on the device that gathers them."""
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
    """float32 values of a part of a matrix; ``operand`` has its codes, and the scales of the whole matrix."""
    # Tiles of the whole matrix need not begin where the part does: a scale for each element.
    scale_inv = reference.spread(operand.scale_inv.float(), operand.format.tile, shape, offset).expand(shape)
    format = dataclasses.replace(operand.format, tile=Tile(1, 1))
    return reference.dequantize(
        Operand(operand.data, scale_inv, format, operand.global_scale_inv), torch.float32
    )
