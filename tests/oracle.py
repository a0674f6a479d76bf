"""Float64 oracle of the float8 recipes, written from the specification with numpy alone.

It shares no code with ``f8sub``: the 256 values of each format come from the bit patterns, the nearest code
from a search in the sorted table with ties to the even code, scales from a float64 division rounded once to
float32, and every matmul runs in float64. Nothing here rounds except where the specification rounds.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

ALL = None  # a tile edge that spans the whole dimension


@dataclass(frozen=True)
class Spec:
    """How one operand is quantized, along the rows and columns of the matrix as it is stored."""

    format: str
    tile: tuple[int | None, int | None]
    power_of_two: bool

    @property
    def square(self) -> bool:
        return self.tile[0] == self.tile[1]


RECIPES: dict[str, dict[str, Spec]] = {
    "tensorwise": {
        "x": Spec("e4m3", (ALL, ALL), False),
        "w": Spec("e4m3", (ALL, ALL), False),
        "dy": Spec("e5m2", (ALL, ALL), False),
    },
    "rowwise": {operand: Spec("e4m3", (1, ALL), True) for operand in ("x", "w", "dy")},
    "rowwise_with_gw_hp": {operand: Spec("e4m3", (1, ALL), True) for operand in ("x", "w", "dy")},
}

HIGH_PRECISION = {"rowwise_with_gw_hp": {"wgrad"}}
"""GEMMs whose operands are read as they are."""

READERS = {"x": ("fprop", "wgrad"), "w": ("fprop", "dgrad"), "dy": ("dgrad", "wgrad")}
"""Which GEMM reads the rowwise and which the columnwise usage of a tensor."""


def _values(exponent_bits: int, mantissa_bits: int, bias: int, ieee: bool) -> np.ndarray:
    """The value of each of the 256 codes; ``ieee`` formats spend the top exponent on inf and NaN."""
    table = np.empty(256)
    top = 2**exponent_bits - 1
    for code in range(256):
        exponent = (code & 0x7F) >> mantissa_bits
        mantissa = code & (2**mantissa_bits - 1)
        if ieee and exponent == top:
            magnitude = np.inf if mantissa == 0 else np.nan
        elif not ieee and (code & 0x7F) == 0x7F:
            magnitude = np.nan
        elif exponent == 0:
            magnitude = mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            magnitude = (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
        table[code] = -magnitude if code & 0x80 else magnitude
    return table


VALUES = {"e4m3": _values(4, 3, 7, ieee=False), "e5m2": _values(5, 2, 15, ieee=True)}
NAN_CODE = 0x7F
LARGEST_SCALE = 2.0**126  # the largest power of two whose inverse is a normal float32
_MAGNITUDES = {name: table[:128][np.isfinite(table[:128])] for name, table in VALUES.items()}
MAX = {name: float(magnitudes[-1]) for name, magnitudes in _MAGNITUDES.items()}
TORCH_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's values, exactly, in float64."""
    return tensor.detach().to(torch.float64).numpy()


def nearest_code(value: np.ndarray, format: str) -> np.ndarray:
    """The code nearest to each value: ties to even, magnitudes beyond the largest clamped, NaN to NaN."""
    magnitudes = _MAGNITUDES[format]
    magnitude = np.minimum(np.abs(value), magnitudes[-1])
    searchable = np.where(np.isnan(value), 0.0, magnitude)
    upper = np.searchsorted(magnitudes, searchable, side="left")
    lower = np.maximum(upper - 1, 0)
    middle = (magnitudes[lower] + magnitudes[upper]) / 2
    even = np.where(lower % 2 == 0, lower, upper)
    code = np.where(searchable < middle, lower, np.where(searchable > middle, upper, even))
    code = np.where(np.signbit(value), code | 0x80, code)
    return np.where(np.isnan(value), NAN_CODE, code).astype(np.uint8)


def scale_of(amax: np.ndarray, spec: Spec) -> np.ndarray:
    """float32 scales that map each amax onto the largest value of the format."""
    safe = np.where(amax > 0, amax, MAX[spec.format])
    scale = np.minimum(MAX[spec.format] / safe, LARGEST_SCALE).astype(np.float32)
    scale = np.where(amax > 0, scale, np.float32(1))
    if spec.power_of_two:
        _, exponent = np.frexp(scale.astype(np.float64))
        scale = np.ldexp(1.0, exponent - 1).astype(np.float32)
    return scale


def _inside(matrix: np.ndarray, tile: tuple[int | None, int | None]) -> tuple[np.ndarray, tuple[int, int]]:
    """Index of the tile of each element, as a pair of broadcastable index vectors, and the grid's shape."""
    rows, columns = matrix.shape
    height, width = tile[0] or max(rows, 1), tile[1] or max(columns, 1)
    index = np.ix_(np.arange(rows) // height, np.arange(columns) // width)
    return index, (-(-rows // height) if rows else 0, -(-columns // width))


@dataclass(frozen=True)
class Quantized:
    """One operand: codes (rows, K), scale_inv (rows of tiles, columns of tiles), and what they stand for."""

    codes: np.ndarray
    scale_inv: np.ndarray
    values: np.ndarray
    spec: Spec

    def codes_as(self, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.from_numpy(self.codes.copy()).view(dtype)


def quantize(matrix: np.ndarray, spec: Spec) -> Quantized:
    """Codes, scales and exact values of a float32-representable matrix held in float64."""
    index, grid = _inside(matrix, spec.tile)
    amax = np.zeros(grid)
    magnitude = np.abs(matrix)
    np.maximum.at(amax, index, np.where(np.isfinite(magnitude), magnitude, 0.0))
    scale = scale_of(amax, spec)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = (matrix * scale[index].astype(np.float64)).astype(np.float32).astype(np.float64)
    scaled = np.where(np.isfinite(matrix), scaled, np.nan)
    codes = nearest_code(scaled, spec.format)
    scale_inv = np.float32(1.0) / scale
    return Quantized(codes, scale_inv, VALUES[spec.format][codes] * scale_inv[index].astype(np.float64), spec)


def derive_columnwise(rowwise: Quantized) -> Quantized:
    """A weight's columnwise operand from its rowwise codes: bytes for square tiles, else a re-scaling."""
    if rowwise.spec.square:
        transposed = (rowwise.codes.T.copy(), rowwise.scale_inv.T.copy(), rowwise.values.T.copy())
        return Quantized(*transposed, rowwise.spec)
    return quantize(rowwise.values.T.copy(), rowwise.spec)


def operands(
    recipe: str, operand: str, tensor: torch.Tensor, high_precision: Collection[str] = ()
) -> tuple[Quantized | None, Quantized | None]:
    """(rowwise, columnwise) of a 2-D tensor that is already in its compute dtype; None where no GEMM reads it.

    ``high_precision`` names GEMMs that the recipe was asked to leave alone besides its own. A weight has no rowwise
    codes to derive columns from where fprop is one of them.
    """
    spec = RECIPES[recipe][operand]
    untouched = HIGH_PRECISION.get(recipe, set()) | set(high_precision)
    matrix = to_numpy(tensor)
    rowwise = quantize(matrix, spec)
    derived = operand == "w" and "fprop" not in untouched
    columnwise = derive_columnwise(rowwise) if derived else quantize(matrix.T.copy(), spec)
    row, col = (
        None if reader in untouched else quantized
        for reader, quantized in zip(READERS[operand], (rowwise, columnwise), strict=True)
    )
    return row, col


def values(
    recipe: str, operand: str, tensor: torch.Tensor, high_precision: Collection[str] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """What the readers of the rowwise and of the columnwise usage multiply."""
    row, col = operands(recipe, operand, tensor, high_precision)
    matrix = to_numpy(tensor)
    return matrix if row is None else row.values, matrix.T.copy() if col is None else col.values


@dataclass(frozen=True)
class Product:
    """``a @ b.t()`` (+ bias) in float64, with the operands that a budget is derived from."""

    a: np.ndarray
    b: np.ndarray
    bias: np.ndarray | None = None

    @property
    def matmul(self) -> np.ndarray:
        return self.a @ self.b.T

    @property
    def value(self) -> np.ndarray:
        return self.matmul if self.bias is None else self.matmul + self.bias


def linear(
    recipe: str,
    x: torch.Tensor,
    w: torch.Tensor,
    dy: torch.Tensor,
    bias: torch.Tensor | None = None,
    high_precision: Collection[str] = (),
) -> dict[str, Product]:
    """The three products of a linear layer over 2-D tensors; ``db`` is the cotangent summed over the rows."""
    x_rows, x_columns = values(recipe, "x", x, high_precision)
    w_rows, w_columns = values(recipe, "w", w, high_precision)
    dy_rows, dy_columns = values(recipe, "dy", dy, high_precision)
    ones = np.ones((1, dy.shape[0]))
    return {
        "y": Product(x_rows, w_rows, None if bias is None else to_numpy(bias)),
        "dx": Product(dy_rows, w_columns),
        "dw": Product(dy_columns, x_columns),
        "db": Product(ones, to_numpy(dy).T),
    }
