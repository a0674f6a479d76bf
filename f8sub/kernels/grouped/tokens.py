"""Tokens in groups, and the specification of how a matrix of them is cast: plain PyTorch.

A tile's edge ALL along the tokens ends where the group does; any other edge begins anew in every group. So every expert
has the codes and scales that a Float8Linear of it has on its own tokens.
"""

from typing import NamedTuple

import torch

from f8sub.formats import ALL, Float8Format, Operand, Tile
from f8sub.kernels import reference
from f8sub.kernels.gemm import block_scales
from f8sub.kernels.grouped.groups import Groups, laid_out
from f8sub.kernels.scales import largest, scales_from_amax


class Tokens(NamedTuple):
    """An operand whose rows, or whose K, are tokens in groups.

    Attributes:
        data: codes, (tokens, K), or (rows, tokens) where ``contracted``.
        scale_inv: a row for each token (edge 1), tile (edge n) or group (edge ALL) along the tokens.
        format: as of ``Operand``.
        groups: where the groups lie along the tokens.
        contracted: whether the product sums over tokens, as wgrad does.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor
    format: Float8Format
    groups: Groups
    contracted: bool

    @property
    def edge(self) -> int:
        """Of a tile along the tokens."""
        return self.format.tile.cols if self.contracted else self.format.tile.rows

    @property
    def is_laid_out(self) -> bool:
        """Whether ``scale_inv`` has the strides of ``empty_scale_inv``, even where a dimension is 1."""
        if self.edge == ALL or self.contracted:
            return self.scale_inv.stride() == (max(self.scale_inv.shape[1], 1), 1)
        return block_scales.is_laid_out(Operand(self.data, self.scale_inv, self.format))

    def of_group(self, index: int, first: int, end: int) -> Operand:
        """What a Float8Linear of that expert holds."""
        edge = self.edge
        part = slice(index, index + 1) if edge == ALL else slice(first // edge, -(-end // edge))
        scale = self.scale_inv[part]
        if self.contracted:
            return Operand(self.data[:, first:end], as_rows(scale.t()), self.format)
        return Operand(self.data[first:end], as_rows(scale), self.format)

    def dequantize(self, groups: Groups, dtype: torch.dtype) -> torch.Tensor:
        """The values of each row of ``groups``, (groups.rows, K); those of no group are zero."""
        codes, scale, is_none = self.by_row(groups)
        return (codes.float() * scale).to(dtype).masked_fill(is_none, 0)

    def by_row(self, groups: Groups) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes (groups.rows, K), scales that broadcast to them, and which rows are of no group, (groups.rows, 1)."""
        codes = self.data.t() if self.contracted else self.data
        edge, cols = self.edge, self.format.tile.rows if self.contracted else self.format.tile.cols
        is_none = groups.past
        place = self.groups.place_of(groups).masked_fill(is_none[:, 0], 0).long()
        tile = groups.of_row().clamp(max=len(groups.ends) - 1) if edge == ALL else place // edge
        scale = reference.spread(
            self.scale_inv.float()[tile], Tile(1, cols), torch.Size((groups.rows, codes.shape[1]))
        )
        return codes.view(torch.uint8)[place].view(codes.dtype), scale, is_none


def as_rows(scale_inv: torch.Tensor) -> torch.Tensor:
    """A row-major copy, whose strides are those of its shape: ``contiguous`` leaves any where a dimension is 1."""
    return torch.empty_like(scale_inv, memory_format=torch.contiguous_format).copy_(scale_inv)


def empty_scale_inv(
    like: torch.Tensor, format: Float8Format, groups: Groups, *, contracted: bool
) -> torch.Tensor:
    """Where kernels and operators store ``Tokens.scale_inv`` of a matrix ``like``, (any, K), in groups.

    Rowwise scales of 1x128 are column-major, as products read them.
    """
    tile = format.tile.t() if contracted else format.tile
    if tile.rows != ALL and not contracted:
        return block_scales.empty_scale_inv(like, format, groups.rows, like.shape[1])
    down, along = tile.scale_shape((groups.rows, like.shape[1]))
    down = len(groups.ends) if tile.rows == ALL else down
    return like.new_empty((down, along), dtype=format.scale_rule.stored_as)


def quantize(
    x: torch.Tensor, groups: Groups, format: Float8Format, *, contracted: bool, multiple: int = 1
) -> Tokens:
    """Codes of ``x``, (groups.rows, K), by group.

    Args:
        x: in high precision; what its rows past the last group hold plays no part, and what is made of them is
            undefined.
        groups: which follow each other.
        format: of the operand.
        contracted: whether the operand is stored as ``x.t()``.
        multiple: groups of the codes begin at multiples of it where their tiles do not need more, zeros between.
    """
    tile = format.tile.t() if contracted else format.tile
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
    return Tokens(codes.t() if contracted else codes, scales.scale_inv, format, found, contracted)
