"""Layer 0. What a float8 operand *is*: element dtype, tile, scale rule. Pure data, no arithmetic on tensors.

Granularity is data, not a branch: tensorwise is ``Tile(ALL, ALL)``, rowwise ``Tile(1, ALL)``, a 128x128 block
``Tile(128, 128)``. Whoever needs to know how scales are laid out asks the tile.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch

from f8sub.errors import Float8ConfigError

ALL = -1
"""A tile edge that spans the whole dimension."""

HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)
"""What can be quantized: dtypes whose products with a scale float32 holds."""

_FLOAT8_MAX = {dtype: torch.finfo(dtype).max for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}


class ScaleRule(Enum):
    """Which float32 values a scale may take."""

    FLOAT = "float"
    """Any float32."""
    POWER_OF_2 = "power_of_2"
    """Powers of two, rounded down, so that a product with a scale is exact and codes can be re-scaled."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of the block of elements that share one scale, over a (rows, cols) matrix.

    The last tile of a dimension that ``rows`` or ``cols`` does not divide is a smaller one.

    Raises:
        Float8ConfigError: an edge that is neither positive nor ``ALL``.
    """

    rows: int
    cols: int

    def __post_init__(self) -> None:
        for edge in (self.rows, self.cols):
            if edge != ALL and edge < 1:
                raise Float8ConfigError(f"a tile edge is a positive number of elements or ALL, got {self}")

    def t(self) -> "Tile":
        """The same block of elements, seen in the transposed matrix."""
        return Tile(self.cols, self.rows)

    def is_transpose_of(self, other: "Tile") -> bool:
        """Whether both put the same elements under one scale, one seen in the transposed matrix."""
        return self.rows == other.cols and self.cols == other.rows

    @property
    def is_whole(self) -> bool:
        """Whether one scale serves the whole matrix."""
        return self.rows == self.cols == ALL

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Number of tiles along each dimension of a matrix of ``shape``."""
        rows, cols = (
            1 if edge == ALL else -(-size // edge)
            for size, edge in zip(shape, (self.rows, self.cols), strict=True)
        )
        return rows, cols

    def __str__(self) -> str:
        return "x".join("all" if edge == ALL else str(edge) for edge in (self.rows, self.cols))


@dataclass(frozen=True, slots=True)
class Float8Format:
    """How one GEMM operand is stored, as a (rows, K) matrix that is contracted along K.

    Attributes:
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        tile: the block of elements that share a scale.
        scale_rule: which values its scales may take.

    Raises:
        Float8ConfigError: a dtype that is not one of the two.
    """

    dtype: torch.dtype
    tile: Tile
    scale_rule: ScaleRule = ScaleRule.FLOAT

    def __post_init__(self) -> None:
        if self.dtype not in _FLOAT8_MAX:
            raise Float8ConfigError(f"a float8 format has a dtype of {list(_FLOAT8_MAX)}, got {self.dtype}")

    @property
    def max(self) -> float:
        """Largest finite value of ``dtype``: 448 for e4m3, 57344 for e5m2."""
        return _FLOAT8_MAX[self.dtype]

    def __str__(self) -> str:
        rule = "" if self.scale_rule is ScaleRule.FLOAT else f",{self.scale_rule.value}"
        return f"{str(self.dtype).split('_')[-1]}[{self.tile}{rule}]"


class Operand(NamedTuple):
    """One GEMM-ready matrix.

    Attributes:
        data: float8 codes, (rows, K), contracted along K. Row-major, as Hopper's tensor cores take it; a transposed
            view only where it was asked for because the GEMM that reads it takes any layout.
        scale_inv: float32, ``format.tile.scale_shape(data.shape)``, always 2-D; multiplies codes to get back
            the high-precision values.
        format: how ``data`` and ``scale_inv`` are to be read.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor
    format: Float8Format


def why_not_derivable(rowwise: Float8Format, columnwise: Float8Format) -> str | None:
    """Why a columnwise operand cannot be made from rowwise codes without rounding twice; None when it can.

    Two ways are exact. When both formats put the same elements under one scale, the bytes are transposed.
    When both have power-of-two scales, the codes are re-scaled: a product with a power of two only moves the
    exponent, so nothing is rounded again except what falls into the subnormals of its new tile.
    """
    if rowwise.dtype != columnwise.dtype:
        return f"the element dtypes differ: {rowwise} and {columnwise}"
    if rowwise.scale_rule is columnwise.scale_rule and rowwise.tile.is_transpose_of(columnwise.tile):
        return None
    if rowwise.scale_rule is columnwise.scale_rule is ScaleRule.POWER_OF_2:
        return None
    return (
        f"{rowwise} and {columnwise} do not put the same elements under one scale, and re-scaling would round "
        "twice because the scales are not powers of two"
    )
