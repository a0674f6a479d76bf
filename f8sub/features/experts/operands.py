"""Operands of grouped products: tokens that lie in groups, one an expert, and weights of all experts.

An edge ALL of a tile along tokens ends where the group does; any other edge begins anew in every group. A tile of a
weight begins anew in every expert. So every expert has the codes and scales that a Float8Linear of it has on its own
tokens. Where groups lie is known to the device alone: nothing here reads it on the host.
"""

from dataclasses import replace
from typing import NamedTuple

import torch

from f8sub.formats import ALL, Float8Format, Operand, Tile
from f8sub.kernels import reference
from f8sub.kernels.groups import Groups
from f8sub.kernels.quantize import quantize_groups


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

    def of_group(self, index: int, first: int, end: int) -> Operand:
        """What a Float8Linear of that expert holds."""
        edge = self.edge
        part = slice(index, index + 1) if edge == ALL else slice(first // edge, -(-end // edge))
        scale = self.scale_inv[part]
        if self.contracted:
            return Operand(self.data[:, first:end], scale.t().contiguous(), self.format)
        return Operand(self.data[first:end], scale, self.format)

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


def quantize_tokens(
    x: torch.Tensor, groups: Groups, format: Float8Format, *, contracted: bool, multiple: int = 1
) -> Tokens:
    """Codes of ``x``, (groups.rows, K), by group.

    Args:
        x: in high precision; what its rows past the last group hold plays no part.
        groups: which follow each other.
        format: of the operand.
        contracted: whether the operand is stored as ``x.t()``.
        multiple: groups of the codes begin at multiples of it where their tiles do not need more, zeros between.
    """
    if contracted:
        found = quantize_both(x, groups, None, format, multiple)[1]
    else:
        found = quantize_both(x, groups, format, None)[0]
    if found is None:
        raise RuntimeError("quantize_both returned no operand for a format")
    return found


def quantize_both(
    x: torch.Tensor,
    groups: Groups,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    multiple: int = 1,
) -> tuple[Tokens | None, Tokens | None]:
    """Both operands of tokens, see ``quantize_tokens``, None where not asked for; ``columnwise`` is ``contracted``."""
    row, col = quantize_groups(x, groups, rowwise, columnwise, multiple)
    return (
        None
        if row is None or rowwise is None
        else Tokens(row.data, row.scale_inv, rowwise, row.groups, False),
        None
        if col is None or columnwise is None
        else Tokens(col.data, col.scale_inv, columnwise, col.groups, True),
    )


def flat_format(format: Float8Format, rows: int) -> Float8Format | None:
    """The format of all experts' rows as one matrix, ``rows`` an expert; None where a scale would be of several."""
    if format.scale_rule.has_global:
        return None
    edge = rows if format.tile.rows == ALL else format.tile.rows
    return None if rows % edge else replace(format, tile=Tile(edge, format.tile.cols))
