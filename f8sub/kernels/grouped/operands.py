"""Tokens in groups, one an expert, and weights of experts; the specification of how both are cast, in plain PyTorch.

Where groups lie is known to the device alone, and nothing here reads it on the host, but for ``Groups.host_bounds``.

A tile's edge ALL along the tokens ends where the group does; any other edge begins anew in every group. So every expert
has the codes and scales that a Float8Linear of it has on its own tokens. The tiles of weights, (E, N, K), begin anew in
every expert.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from f8sub.formats import ALL, Float8Format, Operand, Tile, present
from f8sub.kernels import reference
from f8sub.kernels.gemm import block_scales
from f8sub.kernels.scales import PriorScale, largest, scale_now, scales_from_amax, with_inverse


class Groups(NamedTuple):
    """The places of groups of rows in a buffer.

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
        # To the right of equal ends: a group without rows has none.
        return torch.searchsorted(self.ends, row, right=True)

    def aligned(self, edge: int) -> "Groups":
        """The same groups, each from a multiple of ``edge`` on, in a buffer that has room for any groups."""
        counts = self.ends - self.first
        room = (counts + (edge - 1)) // edge * edge
        # torch sums int32 to int64.
        first = (room.cumsum(0) - room).to(self.ends.dtype)
        return Groups(first, first + counts, aligned_rows(self.rows, len(counts), edge))

    def source_in(self, compact: "Groups") -> torch.Tensor:
        """(rows,): the row of ``compact`` that each row of these aligned groups is, ``compact.rows`` for none."""
        row = torch.arange(self.rows, device=self.first.device, dtype=self.first.dtype)
        group = self.of_aligned_row()
        # Rows between two aligned groups come after the end of the first.
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
    """Return the multiple of rows that groups begin at; 1 where they follow each other.

    ``edge`` is that of a tile along the rows.
    """
    return multiple if edge in (1, ALL) else edge


def laid_out(groups: Groups, edge: int, multiple: int) -> Groups:
    """Return where groups lie in codes whose tiles have that edge along the rows; see ``operands.quantize_tokens``."""
    start = start_of_groups(edge, multiple)
    return groups if start == 1 else groups.aligned(start)


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
        """The edge of a tile along the tokens; ALL where it ends with its group."""
        return self.format.tile.cols if self.contracted else self.format.tile.rows

    @property
    def is_laid_out(self) -> bool:
        """True if ``scale_inv`` has the strides of ``empty_scale_inv``, even where a dimension is 1."""
        if self.edge == ALL or self.contracted:
            return self.scale_inv.stride() == (max(self.scale_inv.shape[1], 1), 1)
        return block_scales.is_laid_out(Operand(self.data, self.scale_inv, self.format))

    def of_group(self, index: int, first: int, end: int) -> Operand:
        """Return the operand that a Float8Linear of that expert holds."""
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
        # As bytes, because torch does not index float8 on every device.
        return codes.view(torch.uint8)[place].view(codes.dtype), scale, is_none


def as_rows(scale_inv: torch.Tensor) -> torch.Tensor:
    """A row-major copy, whose strides are those of its shape: ``contiguous`` leaves any where a dimension is 1."""
    return torch.empty_like(scale_inv, memory_format=torch.contiguous_format).copy_(scale_inv)


def empty_scale_inv(
    like: torch.Tensor, format: Float8Format, groups: Groups, *, contracted: bool, count: int = 1
) -> torch.Tensor:
    """Return uninitialized memory for ``Tokens.scale_inv`` of ``count`` matrices ``like``, (any, K), in groups.

    Rowwise scales of 1x128 are column-major, as products read them, and of one matrix.
    """
    tile = format.tile.t() if contracted else format.tile
    if tile.rows != ALL and not contracted:
        return block_scales.empty_scale_inv(like, format, count * groups.rows, like.shape[1])
    down, along = tile.scale_shape((groups.rows, like.shape[1]))
    down = len(groups.ends) if tile.rows == ALL else down
    return like.new_empty((count * down, along), dtype=format.scale_rule.stored_as)


def quantize_tokens(
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
        # Rows of no group are read from one more row, of zeros.
        x = torch.cat([x, x.new_zeros(1, x.shape[1])])[found.source_in(groups)]
    # Along each row first, then over the rows of a tile or a group.
    amax = largest(torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0), Tile(1, cols))
    if rows == ALL:
        of_row = groups.of_row() if found is groups else found.of_aligned_row()
        count = len(groups.ends)
        # The last entry takes the rows past the last group.
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


def quantize_both(
    x: torch.Tensor,
    groups: Groups,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    multiple: int = 1,
) -> tuple[Tokens | None, Tokens | None]:
    """``quantize_tokens`` of both operands of ``x``, None where not asked for; ``multiple`` is the columnwise one's."""
    return (
        None if rowwise is None else quantize_tokens(x, groups, rowwise, contracted=False),
        None
        if columnwise is None
        else quantize_tokens(x, groups, columnwise, contracted=True, multiple=multiple),
    )


TAKEN = "taken"
"""What is cast of ``Taken``."""


class Taken(NamedTuple):
    """Rows of a matrix by index, each times its factor, that are computed where they are cast.

    A product is rounded to the dtype of x, as PyTorch's is.

    Attributes:
        x: (T, K), in high precision.
        rows: int32 or int64, (M,): the row of x that each one is. No kernel reads those past the last group.
        factors: (M,), in high precision; None for rows as they are.
    """

    x: torch.Tensor
    rows: torch.Tensor
    factors: torch.Tensor | None = None

    @property
    def side(self) -> str:
        """``TAKEN``: what ``computed_of`` knows it by."""
        return TAKEN

    @property
    def matrices(self) -> int:
        """Matrices that are cast: one."""
        return 1

    @property
    def nbytes(self) -> int:
        """Bytes of all that is read for what is cast."""
        return self.rows.shape[0] * self.x.shape[1] * self.x.itemsize

    def empty(self) -> torch.Tensor:
        """A tensor of the shape, dtype and device of what is cast, which holds one element."""
        return self.x.new_empty(1).expand(self.rows.shape[0], self.x.shape[1])

    def values(self) -> torch.Tensor:
        """What is cast, (M, K), as PyTorch computes it."""
        x = self.x[self.rows]
        return x if self.factors is None else (x * self.factors[:, None]).to(x.dtype)


RESULT, BOTH, EACH, GATE, UP = "result", "both", "each", "gate", "up"
"""What is cast: SwiGLU's result; gradients of gate and up side by side, as one weight makes them; as two matrices, up's
below gate's; or one of these."""


class Gated(NamedTuple):
    """SwiGLU's result, or the gradient of its input, that is computed where it is cast.

    Each operator's result is rounded to the dtype of its inputs, as PyTorch's eager operators round.

    Attributes:
        gate: (M, N), in high precision, whose rows may lie in a wider matrix.
        up: (M, N), in rows of the same stride.
        dh: (M, N), the gradient of the result, contiguous; None for ``RESULT``.
        side: ``RESULT``, ``GATE`` or ``UP``, (M, N), ``BOTH``, (M, 2 N), or ``EACH``, two of (M, N).
    """

    gate: torch.Tensor
    up: torch.Tensor
    dh: torch.Tensor | None = None
    side: str = RESULT

    @property
    def matrices(self) -> int:
        """Matrices that are cast, each with scales of its own."""
        return 2 if self.side == EACH else 1

    @property
    def width(self) -> int:
        """Columns of each."""
        width = self.gate.shape[1]
        return 2 * width if self.side == BOTH else width

    @property
    def nbytes(self) -> int:
        """Bytes of all that is read for what is cast."""
        read = 2 if self.side in (RESULT, UP) else 3
        return read * self.gate.numel() * self.gate.itemsize

    def empty(self) -> torch.Tensor:
        """A tensor of the shape, dtype and device of each matrix, which holds one element."""
        return self.gate.new_empty(1).expand(self.gate.shape[0], self.width)

    def values(self) -> torch.Tensor:
        """What is cast, (M, width), as PyTorch computes it; of one matrix."""
        if self.dh is None:
            return F.silu(self.gate) * self.up
        parts = []
        if self.side != UP:
            parts.append(torch.ops.aten.silu_backward(self.dh * self.up, self.gate))
        if self.side != GATE:
            parts.append(self.dh * F.silu(self.gate))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def each(self) -> "tuple[Gated, Gated]":
        """The two matrices of ``EACH``."""
        return self._replace(side=GATE), self._replace(side=UP)


Computed = Gated | Taken


def computed_of(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, side: str) -> Computed:
    """Return what has these tensors and this ``side``."""
    return Taken(a, b, c) if side == TAKEN else Gated(a, b, c, side)


def quantize_computed(
    computed: Computed,
    groups: Groups,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    multiple: int = 1,
) -> tuple[Tokens | None, Tokens | None]:
    """``quantize_both`` of what is computed where it is cast; of two matrices those of the second below the first's."""
    if isinstance(computed, Gated) and computed.side == EACH:
        return stacked(
            [quantize_computed(one, groups, rowwise, columnwise, multiple) for one in computed.each()]
        )
    return quantize_both(computed.values(), groups, rowwise, columnwise, multiple)


def stacked(
    parts: Sequence[tuple[Tokens | None, Tokens | None]],
) -> tuple[Tokens | None, Tokens | None]:
    """Both operands of two matrices, those of the second below the first's, each with its scales; None of none."""
    return _stacked(*(rowwise for rowwise, _ in parts)), _stacked(*(columnwise for _, columnwise in parts))


def _stacked(first: Tokens | None, second: Tokens | None) -> Tokens | None:
    if first is None or second is None:
        return None
    data = torch.cat([part.data.view(torch.uint8) for part in (first, second)]).view(first.data.dtype)
    return first._replace(data=data, scale_inv=torch.cat([first.scale_inv, second.scale_inv]))


def unstacked(both: Tokens) -> tuple[Tokens, Tokens]:
    """The operands of ``_stacked``."""
    # Not by chunk(), which asks whether there are rows: compiled code cannot say so of tokens that other ranks send.
    data, scale_inv = (
        each.unflatten(0, (2, each.shape[0] // 2)).unbind() for each in (both.data, both.scale_inv)
    )
    first, second = (
        both._replace(data=each, scale_inv=scale) for each, scale in zip(data, scale_inv, strict=True)
    )
    return first, second


class QuantizedTokens(NamedTuple):
    """Both operands of tokens, None where not asked for, as ``reference.Quantized`` of a matrix.

    ``amax`` is float32, (E, 1): infinity where an expert has an element that is not finite; None without a prior scale.
    """

    rowwise: Tokens | None
    columnwise: Tokens | None
    amax: torch.Tensor | None = None


def quantize_with_prior(
    x: torch.Tensor,
    groups: Groups,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    multiple: int,
    prior: PriorScale,
) -> QuantizedTokens:
    """Both operands, of one format, with each group's prior scale, (E, 1), as ``reference.quantize`` of its own rows.

    A group without rows has the amax 0.
    """
    format = present(rowwise or columnwise)
    of_row, count = groups.of_row(), len(groups.ends)
    magnitude = x.abs().float().nan_to_num(nan=torch.inf, posinf=torch.inf)
    # Finite magnitudes make the scale; the amax of all shows what is not finite.
    both = torch.stack((magnitude.masked_fill(magnitude.isinf(), 0.0), magnitude), 1).amax(2)
    # Rows past the last group are of one group more.
    found = both.new_zeros(count + 1, 2).scatter_reduce_(0, of_row[:, None].expand_as(both), both, "amax")
    finite, amax = found[:count].split(1, 1)
    made = with_inverse(scale_now(prior, finite, format))
    of_each = torch.cat([made.scale, made.scale.new_ones(1, 1)])[of_row]
    codes = reference.cast(x, of_each, format.dtype)
    row = None if rowwise is None else Tokens(codes, made.scale_inv, rowwise, groups, False)
    if columnwise is None:
        return QuantizedTokens(row, None, amax)
    where = laid_out(groups, ALL, multiple)
    if where is not groups:
        flat = codes.view(torch.uint8)
        flat = torch.cat([flat, flat.new_zeros(1, x.shape[1])])[where.source_in(groups)]
        codes = flat.view(format.dtype)
    return QuantizedTokens(row, Tokens(codes.t(), made.scale_inv, columnwise, where, True), amax)


class ExpertWeights(NamedTuple):
    """An operand of all experts.

    Attributes:
        data: codes, (E, N, K), of any strides.
        scale_inv: (E, n, k), the number of tiles along N and K.
        format: of one expert's operand.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor
    format: Float8Format

    @classmethod
    def of(cls, matrix: Operand, shape: tuple[int, ...], format: Float8Format) -> "ExpertWeights":
        """Make it from the operand of all experts' rows, one after the other."""
        tiles = format.tile.scale_shape((shape[1], shape[2]))
        return cls(matrix.data.view(shape), matrix.scale_inv.view(shape[0], *tiles), format)

    def of_group(self, index: int) -> Operand:
        """Return the operand that a Float8Linear of that expert holds."""
        return Operand(self.data[index], self.scale_inv[index].contiguous(), self.format)

    def t(self) -> "ExpertWeights":
        """The same codes, seen as the operand of the transposed weights."""
        return ExpertWeights(
            self.data.transpose(1, 2), self.scale_inv.transpose(1, 2), seen_transposed(self.format)
        )

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """(E, N, K) in ``dtype``."""
        (rows, cols), tile = self.data.shape[1:], self.format.tile
        scale = self.scale_inv.float()
        for dim, (edge, extent) in enumerate(((tile.rows, rows), (tile.cols, cols)), 1):
            if edge not in (1, ALL):
                scale = scale.repeat_interleave(edge, dim).narrow(dim, 0, extent)
        return (self.data.float() * scale).to(dtype)


def seen_transposed(format: Float8Format) -> Float8Format:
    """The format of the same codes in the transposed matrix."""
    return replace(format, tile=format.tile.t())


def empty_codes(like: torch.Tensor, format: Float8Format) -> ExpertWeights:
    """Return uninitialized memory for the codes of ``like``, (E, N, K), and their scales, both contiguous."""
    count, rows, cols = like.shape
    data = like.new_empty((count, rows, cols), dtype=format.dtype)
    scales = count, *format.tile.scale_shape((rows, cols))
    return ExpertWeights(data, like.new_empty(scales, dtype=format.scale_rule.stored_as), format)


def quantize_weights(w: torch.Tensor, format: Float8Format) -> ExpertWeights:
    """Codes of ``w``, (E, N, K) in high precision, with tiles that begin anew in every expert."""
    count, rows, cols = w.shape
    edge = rows if format.tile.rows == ALL else format.tile.rows
    # Up to whole tiles, so that each expert begins with a new one; zeros raise no amax.
    filled = torch.nn.functional.pad(w, (0, 0, 0, -rows % edge))
    flat = replace(format, tile=Tile(edge, format.tile.cols))
    made = reference.quantize(filled.reshape(-1, cols), flat, None).rowwise
    if made is None:
        raise RuntimeError("quantize returned no rowwise operand for a rowwise format")
    data = made.data.view(filled.shape)[:, :rows]
    return ExpertWeights(data, made.scale_inv.view(count, -1, made.scale_inv.shape[1]), format)


def derive_columnwise(rowwise: ExpertWeights, format: Float8Format) -> ExpertWeights:
    """``reference.derive_columnwise`` of every expert; a view of the codes where both put the same under a scale."""
    if rowwise.format.tile.is_transpose_of(format.tile):
        return rowwise.t()._replace(format=format)
    return quantize_weights(rowwise.dequantize(torch.float32), seen_transposed(format)).t()


def flat_format(format: Float8Format, rows: int) -> Float8Format | None:
    """The format of all experts' rows as one matrix, ``rows`` an expert; None where a scale would be of several."""
    if format.scale_rule.has_global:
        return None
    edge = rows if format.tile.rows == ALL else format.tile.rows
    return None if rows % edge else replace(format, tile=Tile(edge, format.tile.cols))


def stored_format(format: Float8Format, rows: int, transposed: bool) -> Float8Format | None:
    """``flat_format`` of a weight as it is stored.

    Args:
        format: of fprop's operand, (N, K).
        rows: of one expert as they are stored: N, or K where ``transposed``.
        transposed: whether it is stored as (E, K, N).
    """
    return flat_format(seen_transposed(format) if transposed else format, rows)
