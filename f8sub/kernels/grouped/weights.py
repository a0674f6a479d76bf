"""The weights of experts, (E, N, K), and the specification of how they are cast: tiles begin anew in every expert."""

from dataclasses import replace
from typing import NamedTuple

import torch

from f8sub.formats import ALL, Float8Format, Operand, Tile
from f8sub.kernels import reference


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
        """From the operand of all experts' rows, one after the other."""
        tiles = format.tile.scale_shape((shape[1], shape[2]))
        return cls(matrix.data.view(shape), matrix.scale_inv.view(shape[0], *tiles), format)

    def of_group(self, index: int) -> Operand:
        """What a Float8Linear of that expert holds."""
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
    """Where kernels and operators store the codes of ``like``, (E, N, K): contiguous, and so are scales."""
    count, rows, cols = like.shape
    data = like.new_empty((count, rows, cols), dtype=format.dtype)
    scales = count, *format.tile.scale_shape((rows, cols))
    return ExpertWeights(data, like.new_empty(scales, dtype=format.scale_rule.stored_as), format)


def quantize(w: torch.Tensor, format: Float8Format) -> ExpertWeights:
    """Codes of ``w``, (E, N, K) in high precision, with tiles that begin anew in every expert."""
    count, rows, cols = w.shape
    edge = rows if format.tile.rows == ALL else format.tile.rows
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
    return quantize(rowwise.dequantize(torch.float32), seen_transposed(format)).t()


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
