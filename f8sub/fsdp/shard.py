"""Layer 5. One rank's shard of a float8 weight: where it lies, its tiles in the amax table, its codes for the wire."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from f8sub.errors import Float8ConfigError
from f8sub.formats import Float8Format
from f8sub.kernels import reference
from f8sub.tensor.master_weight import MasterWeight


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Where a rank's shard lies in the whole weight.

    Attributes:
        shape: (N, K) of the whole weight.
        dim: the dimension it is sharded along.
        chunk: extent of a full shard along ``dim``; FSDP2 pads shorter ones to it.
        offset: (row, column) of the shard's first element.
        group: the ranks that hold the other shards.
        world: how many they are.
        device: type of the device that gathers; under CPU offload the shard itself lies on the CPU.
    """

    shape: tuple[int, int]
    dim: int
    chunk: int
    offset: tuple[int, int]
    group: dist.ProcessGroup
    world: int
    device: str

    @classmethod
    def of(cls, weight: DTensor, fqn: str) -> "ShardLayout":
        """Read the layout off a weight that ``fully_shard`` has sharded.

        Raises:
            Float8ConfigError: the weight is sharded along more than one mesh dimension.
        """
        mesh, placements = weight.device_mesh, weight.placements
        sharded = [i for i, placement in enumerate(placements) if placement.is_shard()]
        if len(sharded) != 1:
            raise Float8ConfigError(
                f"{fqn}: its weight has placements {placements} on {mesh}; a float8 all-gather takes weights that "
                "are sharded along one mesh dimension (FSDP or HSDP). Convert with float8_all_gather=False"
            )
        (mesh_dim,) = sharded
        dim: int = placements[mesh_dim].dim  # type: ignore[attr-defined]
        world, rank = mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
        rows, cols = weight.shape
        chunk = -(-weight.shape[dim] // world)  # torch.chunk's rule, which FSDP2 shards by
        start = min(rank * chunk, weight.shape[dim])
        offset = (start, 0) if dim == 0 else (0, start)
        return cls((rows, cols), dim, chunk, offset, mesh.get_group(mesh_dim), world, mesh.device_type)

    @property
    def padded_shape(self) -> tuple[int, int]:
        """Shape of every rank's all-gather input."""
        rows, cols = self.shape
        return (self.chunk, cols) if self.dim == 0 else (rows, self.chunk)


class Shard:
    """One rank's shard of one weight, as the wire sees it.

    Attributes:
        fqn: name of the layer.
        master: the high-precision shard.
        layout: where it lies.
        format: of the codes that are gathered: w's rowwise format.
        index: position in the order of its scale table.
        gathers: all-gathers of this weight so far; the same on every rank, because each is a collective.
        dtype: the weight is rounded to it before it is cast: FSDP2's ``param_dtype``.
        amax: float32 view of the scale table, one entry a tile of the whole weight.
        scale: likewise.
        scale_inv: likewise; the unsharded tensor's scales are this very view.
    """

    def __init__(self, fqn: str, master: MasterWeight, layout: ShardLayout, format: Float8Format) -> None:
        self.fqn = fqn
        self.master = master
        self.layout = layout
        self.format = format
        self.index = 0
        self.gathers = 0
        self.dtype = master.dtype
        self.amax = self.scale = self.scale_inv = torch.empty(0)
        self._scaled_state: tuple[int, int] | None = None
        self._wire: torch.Tensor | None = None
        self._wire_key: tuple[tuple[int, int], int, torch.dtype] | None = None

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Number of tiles of the whole weight along each dimension."""
        return self.format.tile.scale_shape(self.layout.shape)

    @property
    def stale(self) -> bool:
        """Whether the shard changed since its amax was taken."""
        return self._scaled_state != self.master.state or not self.master.owns_storage

    def follow(self, layer: torch.nn.Module) -> None:
        """Turn to the local tensor that the layer's parameter holds now.

        FSDP2 pads a short shard anew at its first forward and after ``load_state_dict``, on that rank alone: a
        copy of what the scales were computed from is not a change.
        """
        local = getattr(layer._parameters["weight"], "_local_tensor", None)  # None while it is unsharded
        if local is self.master or not isinstance(local, MasterWeight) or local.cell is self.master.cell:
            return
        was_fresh = not self.stale and local.cell.copies(self.master.cell, local.shape)
        self.master = local
        self._scaled_state = local.state if was_fresh else None

    def write_amax(self) -> None:
        """Write the amax of every tile the shard touches into the table, which is zero there."""
        shard, offset = self.master.plain, self.layout.offset
        if shard.numel() == 0:
            return
        touched = reference.shard_amax(shard, self.format.tile, offset)
        row, col = reference.first_tile(self.format.tile, offset)
        self.amax[row : row + touched.shape[0], col : col + touched.shape[1]] = touched

    def mark_scaled(self) -> None:
        """Remember which state of the shard its amax was taken from."""
        self._scaled_state = self.master.state

    def cast(
        self, source: MasterWeight, generation: int, *, beyond_range: float | None = None
    ) -> torch.Tensor:
        """The shard's codes for the wire, cast once for each set of scales and each change of the weight.

        Args:
            source: the shard on the device that gathers it: ``master``, or its copy under CPU offload.
            generation: which scales the table holds.
            beyond_range: None to clamp to the format's range; else values larger than this many times the
                range become NaN, so that codes cast with an older scale are right or visibly wrong.

        Returns:
            uint8, ``layout.padded_shape``, contiguous; rows or columns past the shard are zero.
        """
        key = (self.master.state, generation, self.dtype)
        if self._wire is None:
            with torch.inference_mode(mode=False):
                self._wire = torch.zeros(self.layout.padded_shape, dtype=torch.uint8, device=source.device)
        if key == self._wire_key and beyond_range is None and self.master.owns_storage:
            return self._wire
        shard = source.plain.to(self.dtype)
        if shard.numel():
            scale = reference.spread(self.scale, self.format.tile, shard.shape, self.layout.offset)
            if beyond_range is not None:
                shard = shard.masked_fill(
                    (shard.float() * scale).abs() > beyond_range * self.format.max, torch.nan
                )
            codes = reference.cast(shard, scale, self.format.dtype).view(torch.uint8)
            with torch.inference_mode(mode=False):
                self._wire[: shard.shape[0], : shard.shape[1]] = codes
        self._wire_key = None if beyond_range is not None else key
        return self._wire

    def unsharded_codes(self, gathered: torch.Tensor) -> torch.Tensor:
        """The whole weight's codes in the gathered bytes: (N, K), a view.

        Args:
            gathered: uint8; the shards one after the other, padding included.
        """
        rows, cols = self.layout.shape
        # Shard(1) arrives with the bytes already in the whole weight's order and only its shape lost.
        return gathered.view(-1)[: rows * cols].view(rows, cols).view(self.format.dtype)
