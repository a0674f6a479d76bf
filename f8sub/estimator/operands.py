"""Counts the bytes of float8 operands: of weights as they are sent and cached, of x as it is saved.

The rules of an estimate's memory and wire, and of a conversion report's account.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from f8sub.formats import ALL
from f8sub.kernels.grouped.operands import aligned_rows, start_of_groups
from f8sub.linear.saved_input import FLOAT8, HIGH_PRECISION, RECOMPUTE
from f8sub.weights.layout import bytes_of_row, lies_in_rows

if TYPE_CHECKING:
    from f8sub.formats import Float8Format
    from f8sub.recipe import OperandName, Recipe

OPERANDS: tuple[OperandName, ...] = ("x", "w", "dy")


def operand_bytes(format: Float8Format, rows: int, depth: int) -> int:
    """Count codes and scales of a (rows, depth) operand, its depth padded as its GEMM needs it."""
    # What fills up the depth is stored, too.
    depth = -(-depth // format.depth_multiple) * format.depth_multiple
    tall, wide = format.tile.scale_shape((rows, depth))
    # The second level of scales: one float32 for the matrix.
    level = 4 if format.scale_rule.has_global else 0
    return rows * depth // format.codes_per_byte + tall * wide * format.scale_rule.stored_as.itemsize + level


def tokens_bytes(
    format: Float8Format, rows: int, cols: int, experts: int, multiple: int, *, contracted: bool
) -> int:
    """Count codes and scales of ``Tokens`` of (rows, cols) in groups.

    Args:
        format: of the operand.
        rows: tokens of all experts.
        cols: features.
        experts: groups.
        multiple: groups begin at multiples of it; those with tiles of several rows at multiples of these.
        contracted: whether the product sums over the rows.
    """
    tile = format.tile.t() if contracted else format.tile
    # A tile belongs to one group, so groups begin where tiles do.
    start = start_of_groups(tile.rows, multiple)
    rows = rows if start == 1 else aligned_rows(rows, experts, start)
    down = experts if tile.rows == ALL else -(-rows // tile.rows)
    along = tile.scale_shape((1, cols))[1]
    return rows * cols // format.codes_per_byte + down * along * format.scale_rule.stored_as.itemsize


def sent_bytes(format: Float8Format, rows: int, cols: int) -> int:
    """Count what an all-gather fills with a whole weight (rows, cols): codes, and scales that stay in their rows."""
    return rows * bytes_of_row(format, cols, lies_in_rows(format.tile))


def amax_bytes(format: Float8Format, rows: int, cols: int) -> int:
    """Count what the all-reduce of amaxes has of a weight (rows, cols): nothing where scales stay in their rows."""
    # one float32 per tile
    return 0 if lies_in_rows(format.tile) else 4 * math.prod(format.tile.scale_shape((rows, cols)))


def saved_x_bytes(
    recipe: Recipe,
    rows: int,
    cols: int,
    plain: int,
    how: str = FLOAT8,
    *,
    experts: int = 0,
    multiple: int = 1,
) -> int:
    """Count what a converted layer saves of its x (rows, cols) for backward.

    Args:
        recipe: the layer's.
        rows: tokens.
        cols: K.
        plain: what x in high precision would add; 0 where something else saves it.
        how: "float8", "high_precision" or "recompute", see ``keep_x``.
        experts: groups of rows; 0 of a linear layer.
        multiple: see ``tokens_bytes``.
    """
    row, col = recipe.formats("x")
    if col is None or how == HIGH_PRECISION:
        return plain
    if experts:
        return tokens_bytes(col, rows, cols, experts, multiple, contracted=True)
    # The rowwise operand of fprop is saved, and the columnwise one computed from it in backward.
    if how == RECOMPUTE and row is not None:
        return operand_bytes(row, rows, cols)
    # wgrad sums over tokens: it reads x as (K, tokens).
    return operand_bytes(col, cols, rows)
