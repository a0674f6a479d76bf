"""Groups of rows, one an expert, and the specification of how a matrix of them is cast: plain PyTorch.

A tile's edge ALL along the rows ends where the group does; any other edge begins anew in every group. So each group
has the codes and scales that it would have as a matrix of its own. Where groups lie is known to the device alone:
nothing here reads it on the host, but for ``Groups.host_bounds``.
"""

from typing import NamedTuple

import torch

from f8sub.formats import ALL, Float8Format, Tile
from f8sub.kernels import reference
from f8sub.kernels.gemm import block_scales
from f8sub.kernels.scales import largest, scales_from_amax


class Groups(NamedTuple):
    """Where groups of rows lie.

    Attributes:
        first: int32, (E,), the first row of each group.
        ends: int32, (E,), the row after its last one.
        rows: of the buffer that they lie in, a number that the host knows.
    """

    first: torch.Tensor
    ends: torch.Tensor
    rows: int

    @classmethod
    def of(cls, ends: torch.Tensor, rows: int) -> "Groups":
        """Groups that follow each other from the first row on."""
        return cls(torch.cat([ends.new_zeros(1), ends[:-1]]), ends, rows)

    @property
    def host_bounds(self) -> list[tuple[int, int]]:
        """First row and end of each group, read on the host: for the reference alone."""
        return list(zip(self.first.tolist(), self.ends.tolist(), strict=True))

    @property
    def past(self) -> torch.Tensor:
        """Bool, (rows, 1): the rows after the last group."""
        row = torch.arange(self.rows, device=self.ends.device, dtype=self.ends.dtype)
        return (row >= self.ends[-1])[:, None]

    def of_row(self) -> torch.Tensor:
        """int64, (rows,): the group of each row of groups that follow each other; E for rows past the last one."""
        row = torch.arange(self.rows, device=self.ends.device, dtype=self.ends.dtype)
        return torch.searchsorted(self.ends, row, right=True)

    def aligned(self, edge: int) -> "Groups":
        """The same groups, each from a multiple of ``edge`` on, in a buffer that has room for any groups."""
        counts = self.ends - self.first
        room = (counts + (edge - 1)) // edge * edge
        first = (room.cumsum(0) - room).to(self.ends.dtype)
        return Groups(first, first + counts, aligned_rows(self.rows, len(counts), edge))

    def source_in(self, compact: "Groups") -> torch.Tensor:
        """(rows,): the row of ``compact`` that each row of these aligned groups is, ``compact.rows`` for none."""
        row = torch.arange(self.rows, device=self.first.device, dtype=self.first.dtype)
        group = self.of_aligned_row()
        return torch.where(
            row < self.ends[group], row - self.first[group] + compact.first[group], compact.rows
        )

    def of_aligned_row(self) -> torch.Tensor:
        """int64, (rows,): the group of each row of aligned groups; that before it for rows between two."""
        row = torch.arange(self.rows, device=self.first.device, dtype=self.first.dtype)
        return (torch.searchsorted(self.first, row, right=True) - 1).clamp(min=0)

    def place_of(self, compact: "Groups") -> torch.Tensor:
        """(compact.rows,): the row of these aligned groups that each row of ``compact`` is; ``rows`` for none."""
        row = torch.arange(compact.rows, device=self.first.device, dtype=self.first.dtype)
        group = compact.of_row().clamp(max=len(self.ends) - 1)
        return torch.where(row < compact.ends[-1], row - compact.first[group] + self.first[group], self.rows)


def aligned_rows(rows: int, count: int, edge: int) -> int:
    """Rows of a buffer that has room for any ``count`` groups of ``rows`` rows, each from a multiple of ``edge`` on."""
    return -(-(rows + count * (edge - 1)) // edge) * edge


def start_of_groups(edge: int, multiple: int) -> int:
    """What groups begin at multiples of where tiles have that edge along the rows; 1 where they follow each other."""
    return multiple if edge in (1, ALL) else edge


def laid_out(groups: Groups, edge: int, multiple: int) -> Groups:
    """Where groups lie in codes whose tiles have that edge along the rows; see ``quantize``."""
    start = start_of_groups(edge, multiple)
    return groups if start == 1 else groups.aligned(start)


class Codes(NamedTuple):
    """One usage of a matrix of groups.

    Attributes:
        data: codes, (rows, K), or (K, rows) of the columnwise usage.
        scale_inv: of either usage a row for each row (edge 1), tile (edge n) or group (edge ALL) along the rows.
        groups: where they lie along the rows.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor
    groups: Groups


def empty_scale_inv(
    like: torch.Tensor, format: Float8Format, groups: Groups, *, columnwise: bool
) -> torch.Tensor:
    """Where kernels and operators store ``Codes.scale_inv`` of a matrix ``like``, (any, K), in groups.

    Rowwise scales of 1x128 are column-major, as products read them.
    """
    tile = format.tile.t() if columnwise else format.tile
    if tile.rows != ALL and not columnwise:
        return block_scales.empty_scale_inv(like, format, groups.rows, like.shape[1])
    down, along = tile.scale_shape((groups.rows, like.shape[1]))
    down = len(groups.ends) if tile.rows == ALL else down
    return like.new_empty((down, along), dtype=format.scale_rule.stored_as)


def quantize(
    x: torch.Tensor, groups: Groups, format: Float8Format, *, columnwise: bool, multiple: int = 1
) -> Codes:
    """Codes of ``x``, (groups.rows, K), by group.

    Args:
        x: in high precision; what its rows past the last group hold plays no part, and what is made of them is
            undefined.
        groups: which follow each other.
        format: of the operand.
        columnwise: whether the operand is stored as ``x.t()``.
        multiple: groups of the codes begin at multiples of it where their tiles do not need more, zeros between.
    """
    tile = format.tile.t() if columnwise else format.tile
    rows, cols = tile.rows, tile.cols
    found = laid_out(groups, rows, multiple)
    if found is not groups:
        x = torch.cat([x, x.new_zeros(1, x.shape[1])])[found.source_in(groups)]
    amax = largest(torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0), Tile(1, cols))
    if rows == ALL:
        of_row = groups.of_row() if found is groups else found.of_aligned_row()
        count = len(groups.ends)
        per_group = amax.new_zeros(count + 1, amax.shape[1])
        per_group.scatter_reduce_(0, of_row[:, None].expand_as(amax), amax, "amax")
        scales = scales_from_amax(per_group[:count], format)
        scale = torch.cat([scales.scale, scales.scale.new_ones(1, amax.shape[1])])[of_row]
    else:
        amax = amax.unflatten(0, (-1, rows)).amax(1) if rows > 1 else amax
        scales = scales_from_amax(amax, format)
        scale = scales.scale.repeat_interleave(rows, 0) if rows > 1 else scales.scale
    codes = reference.cast(x, reference.spread(scale, Tile(1, cols), x.shape), format.dtype)
    return Codes(codes.t() if columnwise else codes, scales.scale_inv, found)
