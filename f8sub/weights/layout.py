"""ShardLayout: the place of one rank's shard in a weight; WireFormat: the bytes that the rank sends of it."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from f8sub.errors import Float8ConfigError
from f8sub.formats import ALL, Float8Format, Tile, aligned, bytes_of_row, lies_in_rows
from f8sub.torch_compat import all_gather, is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Describes where a rank's shard lies in the whole weight.

    A weight with leading dimensions, (E, N, K) of experts, counts as the matrix (E * N, K). Tensor parallelism cuts the
    whole weight into parts, and ``fully_shard`` shards each part along its first or last dimension. FSDP2 then gathers
    the rank's part, whose scales are nevertheless the whole weight's. Sharded along N, (E, N, K) counts as (E, N * K).
    With ``apart``, the experts that a rank has are the whole weight: no tile reaches over two of them.

    Attributes:
        whole: (rows, columns) of the whole weight.
        shape: (rows, columns) of what FSDP2 gathers: the whole weight, or the rank's tensor-parallel part.
        inner: dimensions between the first and the last, (N,) of (E, N, K).
        folded: (N, K) where (E, N, K) counts as (E, N * K); else None.
        origin: (row, column) in the whole weight at which ``shape`` begins.
        cuts: (dimension, extent of a full part) of each tensor-parallel cut.
        dim: the dimension of the matrix that FSDP2 shards along.
        chunk: extent of a full shard along ``dim``; FSDP2 pads shorter ones to it.
        offset: (row, column) in the whole weight at which the shard begins.
        group: the ranks that hold the shards of ``shape``, ``world`` of them.
        sharers: the ranks that hold shards of the whole weight; ``ranks`` adds their replicas under HSDP.
        device: type of the device that gathers; under CPU offload the shard itself lies on the CPU.
    """

    whole: tuple[int, int]
    shape: tuple[int, int]
    inner: tuple[int, ...]
    folded: tuple[int, int] | None
    origin: tuple[int, int]
    cuts: tuple[tuple[int, int], ...]
    dim: int
    chunk: int
    offset: tuple[int, int]
    group: dist.ProcessGroup
    world: int
    sharers: tuple[int, ...]
    ranks: tuple[int, ...]
    device: str

    @classmethod
    def of(cls, weight: "DTensor", fqn: str = "a layer", *, apart: bool = False) -> "ShardLayout":
        """Return the layout of a sharded weight; Float8ConfigError where a middle dimension is sharded.

        One that torch's ``replicate`` leaves whole on every rank is sharded over that rank alone.
        """
        mesh, dims = weight.device_mesh, sharded_dims(weight)
        first, *tensor_parallel = dims or (None,)  # fully_shard's mesh dimension comes first
        others = {i for i in tensor_parallel if apart and weight.dim() == 3 and dims[i] == 0}
        is_folded = weight.dim() == 3 and 1 in dims.values()
        if not set(dims.values()) <= ({0, 1} if is_folded else {0, weight.dim() - 1}):
            raise Float8ConfigError(
                f"{fqn}: its weight {tuple(weight.shape)} is sharded as {weight.placements}; shard the first or the "
                "last dimension, or the rows of experts"
            )
        inner = () if is_folded else tuple(weight.shape[1:-1])
        rows = math.prod(inner)  # of the matrix, for each index of the first dimension
        whole = [weight.shape[0] * rows, math.prod(weight.shape[1:]) // rows]
        start, size, cuts = [0, 0], whole.copy(), {}
        shape, origin = whole.copy(), start.copy()
        # DTensor cuts by tensor parallelism first, and FSDP2 shards what each rank has left. So the last turn's size
        # before the cut is ``shape``, and after it the shard's.
        for mesh_dim in () if first is None else (*tensor_parallel, first):
            # ``each`` is how many rows (columns) of the matrix one index of the sharded dimension is.
            dim, each = (0, rows) if dims[mesh_dim] == 0 else (1, weight.shape[-1] if is_folded else 1)
            shape, origin = size.copy(), start.copy()
            # torch.chunk's rule, which FSDP2 and DTensor shard by
            chunk = -(-size[dim] // (each * mesh.size(mesh_dim))) * each
            before = min(mesh.get_local_rank(mesh_dim) * chunk, size[dim])
            start[dim], size[dim] = start[dim] + before, min(chunk, size[dim] - before)
            cuts[mesh_dim] = dim, chunk
            if mesh_dim in others:
                # Experts of other ranks are other weights: this rank's begin at row 0.
                start[0], whole[0] = 0, size[0]
        # ``holders`` fixes the mesh dimensions that split experts; own_mesh keeps only those that shard this weight.
        here = tuple(enumerate(mesh.get_coordinate() or ()))
        holders = mesh.mesh[tuple(place if i in others else slice(None) for i, place in here)]
        own_mesh = tuple(slice(None) if i in dims and i not in others else place for i, place in here)
        # A replicated weight has no sharding dimension; it counts as one shard in a world of 1.
        return cls(
            whole=(whole[0], whole[1]),
            shape=(shape[0], shape[1]),
            inner=inner,
            folded=(weight.shape[1], weight.shape[2]) if is_folded else None,
            origin=(origin[0], origin[1]),
            cuts=tuple(cuts[i] for i in tensor_parallel if i not in others),
            dim=0 if first is None else cuts[first][0],
            chunk=whole[0] if first is None else cuts[first][1],
            offset=(start[0], start[1]),
            group=mesh.get_group(first or 0),
            world=1 if first is None else mesh.size(first),
            sharers=tuple(sorted(mesh.mesh[own_mesh].flatten().tolist())),
            ranks=tuple(holders.flatten().tolist()),
            device=mesh.device_type,
        )

    @property
    def leading(self) -> tuple[int, ...] | None:
        """All dimensions but the last of what FSDP2 puts together; None for a matrix."""
        if self.folded is not None:
            return self.shape[0], self.shape[1] // self.folded[1]
        return (self.shape[0] // math.prod(self.inner), *self.inner) if self.inner else None

    def matrix(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the shard without leading dimensions."""
        if self.folded is not None:
            return shard.flatten(1)
        return shard.view(shard.shape[0] * math.prod(self.inner), shard.shape[-1]) if self.inner else shard

    def stacked(self, codes: torch.Tensor) -> torch.Tensor:
        """Return data for the wire with the shard's leading dimensions, which FSDP2 may compare."""
        if self.folded is not None:
            return codes.view(codes.shape[0], -1, self.folded[1])
        return codes.unflatten(0, (-1, *self.inner)) if self.inner else codes

    def format_of(self, format: Float8Format, fqn: str) -> Float8Format:
        """Return the format of the matrix that the weight counts as; Float8ConfigError where tiles cross its rows.

        ``format`` is of the matrix (E * N, K).
        """
        if self.folded is None:
            return format
        if (found := format_along_rows(format, *self.folded)) is None:
            raise Float8ConfigError(f"{fqn}: {ALONG_ROWS.format(format)}")
        return found

    def tiles_of_part(self, scales: torch.Tensor, tile: Tile) -> torch.Tensor:
        """Return those scales of the whole weight that belong to ``shape``, as a view."""
        for dim, edge in enumerate((tile.rows, tile.cols)):
            if edge != ALL:
                scales = scales.narrow(dim, self.origin[dim] // edge, tile.scale_shape(self.shape)[dim])
        return scales


ALONG_ROWS = (
    "its weight is sharded along the rows of each expert (Shard(1)), and {} has tiles of several rows; shard it along "
    "experts, or convert with float8_all_gather=False"
)


def format_along_rows(format: Float8Format, rows: int, cols: int) -> Float8Format | None:
    """Return the format of a matrix whose rows are whole experts of (rows, cols); None where tiles cross its rows."""
    tile = format.tile
    if tile.rows == 1 and (tile.cols == ALL or cols % tile.cols == 0):
        return replace(format, tile=Tile(1, cols if tile.cols == ALL else tile.cols))
    if tile.rows == rows and tile.cols == ALL:
        return replace(format, tile=Tile(1, ALL))
    return None


def cannot_be_gathered(weight: torch.Tensor | None, format: Float8Format | None) -> bool:
    """Return whether a weight of experts is sharded along the rows of each, and tiles of its format cross them."""
    if weight is None or format is None or not is_dtensor(weight) or weight.dim() != 3:
        return False
    sharded: Any = weight
    return 1 in sharded_dims(sharded).values() and format_along_rows(format, *weight.shape[1:]) is None


def sharded_dims(weight: "DTensor") -> dict[int, int]:
    """Return the dimension of the weight that each mesh dimension shards; none for those that replicate it."""
    # FSDP2 with tensor parallelism on one dimension has a placement of its own, which is no Shard.
    dims = {i: getattr(placement, "dim", None) for i, placement in enumerate(weight.placements)}
    return {i: dim for i, dim in dims.items() if dim is not None}


class WireFormat:
    """Describes what one rank sends of a weight: a uint8 matrix whose rows are the float8 rows of the shard.

    Scales of tiles that lie inside one row follow the row's data (``carries_scales``): the rank that holds the row
    knows them. All other tiles cross shards. Every rank computes their scales from the amax table, and none sends them.

    Attributes:
        format: of the matrix that the weight counts as.
        format_whole: of what ``unsharded`` returns.
    """

    def __init__(self, format: Float8Format, layout: ShardLayout, fqn: str = "a layer") -> None:
        self.format_whole, self.format, self.layout = format, layout.format_of(format, fqn), layout
        tile = self.format.tile
        whole_tiles = all(dim == 0 or part % tile.cols == 0 for dim, part in layout.cuts)
        # A row must be whole on its rank: Shard(1), or a tensor-parallel cut through a tile,
        # splits a row's tiles between ranks. A row of several rows of experts could not be viewed as these.
        self.carries_scales = lies_in_rows(tile) and layout.dim == 0 and whole_tiles and layout.folded is None

    @property
    def table_tile(self) -> Tile:
        """The tile that one entry of the amax table stands for; the whole weight where the table only reports NaN."""
        return Tile(ALL, ALL) if self.carries_scales else self.format.tile

    @property
    def padded_shape(self) -> tuple[int, int]:
        """Shape of every rank's all-gather input, in bytes."""
        rows, cols = self.layout.shape
        rows, cols = (self.layout.chunk, cols) if self.layout.dim == 0 else (rows, self.layout.chunk)
        return rows, bytes_of_row(self.format, cols, self.carries_scales)

    def scales_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the scales in rows of the wire, as they are stored: a view."""
        cols = self.layout.shape[1]
        # [ data, padded to 16 bytes | scales, padded to 16 bytes ]
        start = aligned(cols // self.format.codes_per_byte)
        stored_as = self.format.scale_rule.stored_as
        count = self.format.tile.scale_shape((1, cols))[1] * stored_as.itemsize
        return rows[:, start : start + count].view(stored_as)

    def gather(self, codes: torch.Tensor, gathered: torch.Tensor) -> None:
        """Write all ranks' codes, this rank's ``codes`` of ``padded_shape`` among them, to ``gathered``."""
        if self.layout.world == 1:
            gathered.view(-1).copy_(codes.view(-1))
        elif self.layout.dim == 0:
            all_gather(gathered.view(-1), codes.view(-1), self.layout.group)
        else:
            # The shards arrive one after the other and lie side by side in the whole weight.
            shards = torch.empty_like(gathered).view(self.layout.world, *codes.shape)
            all_gather(shards.view(-1), codes.view(-1), self.layout.group)
            torch.cat(list(shards), dim=1, out=gathered.view(codes.shape[0], -1))

    def unsharded(self, gathered: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views: the gathered data of ``layout.shape``; their scales, ``scales`` where the wire has none."""
        rows, cols = self.layout.shape
        codes_end = cols // self.format.codes_per_byte
        # Shard(0) pads the last rank's rows: they come after the weight's, and the view leaves them out.
        width = self.padded_shape[1] if self.layout.dim == 0 else codes_end
        # Shard(1) arrives with the bytes already in the whole weight's order and only its shape lost.
        whole = gathered.view(-1)[: rows * width].view(rows, width)
        codes = whole[:, :codes_end].view(self.format.dtype)
        if (folded := self.layout.folded) is not None:
            codes = codes.view(-1, folded[1])
            tile = self.format_whole.tile
            # A scale of each row, of those that this rank has of an expert; or one of the expert as a whole.
            each = cols // folded[1] if tile.rows == 1 else folded[0]
            scales = scales.view(tile.scale_shape((scales.shape[0] * each, folded[1])))
        return codes, self.scales_of(whole) if self.carries_scales else scales
