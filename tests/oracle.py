"""Float64 oracle of the float8 recipes, written from the specification with numpy alone.

It shares no code with ``f8sub``: the values of each format come from the bit patterns, the nearest code
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
    """How one operand is quantized, along the rows and columns of the matrix as it is stored.

    The rule says which scales there are: any ``float``; a ``power_of_2``, rounded down; the same with an inverse
    stored as an ``e8m0`` exponent byte (OCP MX v1.0, rounded as in arXiv 2506.08027, so that nothing overflows);
    or ``two_level``, an e4m3 inverse a tile under one float32 inverse a matrix (NVFP4, arXiv 2509.25149). The margin is
    in powers of two, of headroom above the amax.
    """

    format: str
    tile: tuple[int | None, int | None]
    rule: str = "float"
    margin: float = 0

    @property
    def square(self) -> bool:
        return self.tile[0] == self.tile[1]

    @property
    def codes_per_byte(self) -> int:
        return 2 if self.format == "e2m1" else 1

    def code_bytes(self, rows: int, depth: int) -> int:
        return rows * -(-depth // self.codes_per_byte)

    def scale_bytes(self, rows: int, depth: int) -> int:
        edges = zip((rows, depth), self.tile, strict=True)
        tiles = (1 if edge is ALL else -(-size // edge) for size, edge in edges)
        count = next(tiles) * next(tiles)
        return {"e8m0": count, "two_level": count + 4}.get(self.rule, 4 * count)


def _blockwise(rule: str) -> dict[str, Spec]:
    """DeepSeek-V3, arXiv 2412.19437: tokens by 1x128 in both directions, weights by 128x128."""
    row = Spec("e4m3", (1, 128), rule)
    return {"x": row, "w": Spec("e4m3", (128, 128), rule), "dy": row}


def _grid(edge: int, dy: str) -> dict[str, Spec]:
    block = Spec("e4m3", (edge, edge))
    return {"x": block, "w": block, "dy": Spec(dy, (edge, edge))}


_NVFP4 = Spec("e2m1", (1, 16), "two_level")
"""Weights by 16x16, so that both usages of a weight stand for the same numbers."""

_TENSOR = Spec("e4m3", (ALL, ALL))
_ROWWISE = dict.fromkeys(("x", "w", "dy"), Spec("e4m3", (1, ALL), "power_of_2"))

RECIPES: dict[str, dict[str, Spec]] = {
    "blockwise": _blockwise("power_of_2"),
    "gridquant": _grid(256, "e5m2"),
    "mxfp8": dict.fromkeys(("x", "w", "dy"), Spec("e4m3", (1, 32), "e8m0")),
    "nvfp4": {"x": _NVFP4, "w": Spec("e2m1", (16, 16), "two_level"), "dy": _NVFP4},
    "rowwise": _ROWWISE,
    "rowwise_with_gw_hp": _ROWWISE,
    "tensorwise": {"x": _TENSOR, "w": _TENSOR, "dy": Spec("e5m2", (ALL, ALL))},
    # Of a first step: scaled by the current amax.
    "delayed": {"x": _TENSOR, "w": _TENSOR, "dy": Spec("e5m2", (ALL, ALL), margin=4)},
}
"""Formats of each tensor; the columnwise operand is the transposed matrix, quantized along its own rows."""

_ROW = Spec("e4m3", (1, ALL))
_FOUR_BITS = Spec("e2m1", (ALL, ALL))
VARIANTS = {
    "blockwise-float": _blockwise("float"),
    "gridquant-32-e4m3": _grid(32, "e4m3"),
    "mx": dict.fromkeys(("x", "w", "dy"), Spec("e4m3", (1, 32), "power_of_2")),
    "odd-tiles": {"x": Spec("e4m3", (3, 7)), "w": Spec("e4m3", (5, 5)), "dy": _ROW},
    "rows-by-tensor": {"x": _ROW, "w": _TENSOR, "dy": _ROW},
    "four-bits-by-tensor": {"x": _FOUR_BITS, "w": _FOUR_BITS, "dy": Spec("e2m1", (1, ALL))},
    "two-levels-by-tensor": dict.fromkeys(("x", "w", "dy"), Spec("e4m3", (ALL, ALL), "two_level")),
}
"""The same with options, and recipes that f8sub does not ship: the tile idea carries them all."""

HIGH_PRECISION = {"rowwise_with_gw_hp": {"wgrad"}}
"""GEMMs whose operands are read as they are."""

READERS = {"x": ("fprop", "wgrad"), "w": ("fprop", "dgrad"), "dy": ("dgrad", "wgrad")}
"""Which GEMM reads the rowwise and which the columnwise usage of a tensor."""


def _values(exponent_bits: int, mantissa_bits: int, bias: int, special: str) -> np.ndarray:
    """The value of every code; ``special``: the top exponent is inf and NaN (ieee), all ones are NaN, or none is."""
    half = 2 ** (exponent_bits + mantissa_bits)
    magnitudes = np.empty(half)
    for code in range(half):
        exponent, mantissa = code >> mantissa_bits, code % 2**mantissa_bits
        if special == "ieee" and exponent == 2**exponent_bits - 1:
            magnitudes[code] = np.inf if mantissa == 0 else np.nan
        elif special == "all_ones" and code == half - 1:
            magnitudes[code] = np.nan
        elif exponent == 0:
            magnitudes[code] = mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            magnitudes[code] = (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
    return np.concatenate([magnitudes, -magnitudes])


VALUES = {
    "e4m3": _values(4, 3, 7, "all_ones"),
    "e5m2": _values(5, 2, 15, "ieee"),
    "e2m1": _values(2, 1, 1, "none"),
}
NAN_CODE = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 0}  # e2m1 has none: the scale of the tile is NaN
LARGEST_SCALE = 2.0**126  # the largest power of two whose inverse is a normal float32
SMALLEST_TILE_SCALE_INV = 2.0**-9  # of two levels: the smallest e4m3 there is
_POSITIVE = {name: table[: len(table) // 2] for name, table in VALUES.items()}
_MAGNITUDES = {name: table[np.isfinite(table)] for name, table in _POSITIVE.items()}
MAX = {name: float(magnitudes[-1]) for name, magnitudes in _MAGNITUDES.items()}
TORCH_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.float4_e2m1fn_x2}


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
    code = np.where(np.signbit(value), code + len(VALUES[format]) // 2, code)
    return np.where(np.isnan(value), NAN_CODE[format], code).astype(np.uint8)


def scale_of(amax: np.ndarray, spec: Spec) -> np.ndarray:
    """float32 scales of one level that map each amax onto the largest value of the format; 1 for zero."""
    safe = np.where(amax > 0, amax, MAX[spec.format])
    scale = np.minimum(MAX[spec.format] / (safe * 2.0**spec.margin), LARGEST_SCALE).astype(np.float32)
    scale = np.where(amax > 0, scale, np.float32(1))
    if spec.rule != "float":
        _, exponent = np.frexp(scale.astype(np.float64))
        scale = np.ldexp(1.0, exponent - 1).astype(np.float32)
    return scale


@dataclass(frozen=True)
class Scales:
    """float32 scales and their inverses, one a tile, and the inverse of the whole matrix where there is one."""

    scale: np.ndarray
    scale_inv: np.ndarray
    global_scale_inv: np.float32 | None


def scales_of(amax: np.ndarray, spec: Spec) -> Scales:
    if spec.rule != "two_level":
        scale = scale_of(amax, spec)
        return Scales(scale, np.float32(1) / scale, None)
    # The matrix's takes its amax to the largest code times the largest e4m3; the tile's does the rest.
    smallest = 1 / (LARGEST_SCALE * SMALLEST_TILE_SCALE_INV)
    largest = amax.max(initial=0.0)
    level = np.float32(max(largest / (MAX[spec.format] * MAX["e4m3"]), smallest) if largest else 1)
    tile = np.clip(amax / (MAX[spec.format] * float(level)), SMALLEST_TILE_SCALE_INV, MAX["e4m3"])
    tile = np.where(amax > 0, tile.astype(np.float32), np.float32(1))
    scale_inv = VALUES["e4m3"][nearest_code(tile.astype(np.float64), "e4m3")]
    return Scales((1 / (scale_inv * float(level))).astype(np.float32), scale_inv.astype(np.float32), level)


def largest_of_tiles(matrix: np.ndarray, tile: tuple[int | None, int | None]) -> np.ndarray:
    """Of magnitudes; tiles at the lower and right edges may be cut off."""
    rows, columns = matrix.shape
    height, width = tile[0] or max(rows, 1), tile[1] or max(columns, 1)
    whole = np.pad(matrix, ((0, -rows % height), (0, -columns % width)))
    tiles = whole.reshape(-(-rows // height), height, -(-columns // width), width)
    return tiles.max(axis=(1, 3), initial=0.0)


def _spread(tiles: np.ndarray, tile: tuple[int | None, int | None], shape: tuple[int, int]) -> np.ndarray:
    """One entry a tile, in float64, repeated for each of its elements."""
    for axis, (edge, size) in enumerate(zip(tile, shape, strict=True)):
        tiles = np.repeat(tiles, edge or size, axis)
    return tiles[: shape[0], : shape[1]].astype(np.float64)


@dataclass(frozen=True)
class Quantized:
    """One operand: codes (rows, K), one a byte; scale_inv (rows of tiles, columns of tiles); what they stand for."""

    codes: np.ndarray
    scale_inv: np.ndarray
    global_scale_inv: np.float32 | None
    values: np.ndarray
    spec: Spec

    def codes_as(self, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """The bytes that are stored: of two codes in one the first is in the low half."""
        codes = self.codes
        if self.spec.codes_per_byte == 2:
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        return torch.from_numpy(codes.copy()).view(dtype)

    def stored_scale_inv(self) -> torch.Tensor:
        """The inverse scales' bits: of float32, or one byte each."""
        match self.spec.rule:
            case "e8m0":
                return torch.from_numpy((np.frexp(self.scale_inv)[1] + 126).astype(np.uint8))
            case "two_level":
                return torch.from_numpy(nearest_code(self.scale_inv.astype(np.float64), "e4m3"))
            case _:
                return torch.from_numpy(self.scale_inv.copy()).view(torch.int32)

    def differences(self, operand: tuple) -> list[str]:
        """Names of what is not bitwise equal in an ``f8sub.Operand``; one NaN code is as good as another."""
        scale_inv, level = operand.scale_inv, operand.global_scale_inv
        codes = operand.data.view(torch.uint8)
        if self.spec.codes_per_byte == 1:
            codes = codes.masked_fill(torch.from_numpy(np.isnan(VALUES[self.spec.format][codes])), 0x7F)
        same = {
            "dtype": operand.data.dtype == TORCH_DTYPES[self.spec.format],
            "codes": torch.equal(codes, self.codes_as()),
            "scale_inv": torch.equal(
                scale_inv.view({1: torch.uint8, 4: torch.int32}[scale_inv.element_size()]),
                self.stored_scale_inv(),
            ),
            "global_scale_inv": (level is None) == (self.global_scale_inv is None)
            and (level is None or (level.dtype == torch.float32 and level.item() == self.global_scale_inv)),
        }
        return [name for name, equal in same.items() if not equal]


def quantize(matrix: np.ndarray, spec: Spec) -> Quantized:
    """Codes, scales and exact values of a float32-representable matrix held in float64.

    Where two codes share a byte, K is filled up with zeros to whole bytes. NaN and infinity take no part in an amax;
    they are NaN codes, or where the format has none NaN scales, of their tiles alone.
    """
    matrix = np.pad(matrix, ((0, 0), (0, -matrix.shape[1] % spec.codes_per_byte)))
    finite = np.isfinite(matrix)
    bad = (largest_of_tiles(~finite, spec.tile) > 0) & (spec.format == "e2m1")
    amax = largest_of_tiles(np.where(finite, np.abs(matrix), 0.0), spec.tile)
    scales = scales_of(np.where(bad, 0.0, amax), spec)
    scale, scale_inv = (np.where(bad, np.float32(np.nan), part) for part in (scales.scale, scales.scale_inv))
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = (matrix * _spread(scale, spec.tile, matrix.shape)).astype(np.float32).astype(np.float64)
    codes = nearest_code(np.where(finite, scaled, np.nan), spec.format)
    factor = _spread(scale_inv, spec.tile, matrix.shape) * float(scales.global_scale_inv or 1)
    return Quantized(codes, scale_inv, scales.global_scale_inv, VALUES[spec.format][codes] * factor, spec)


def derive_columnwise(rowwise: Quantized) -> Quantized:
    """A weight's columnwise operand from its rowwise codes: bytes for square tiles, else a re-scaling."""
    if not rowwise.spec.square:
        return quantize(rowwise.values.T.copy(), rowwise.spec)
    codes, scale_inv, values = (part.T.copy() for part in (rowwise.codes, rowwise.scale_inv, rowwise.values))
    return Quantized(codes, scale_inv, rowwise.global_scale_inv, values, rowwise.spec)


def spec_of(recipe: str, operand: str) -> Spec:
    return (RECIPES | VARIANTS)[recipe][operand]


def operands(
    recipe: str, operand: str, tensor: torch.Tensor, high_precision: Collection[str] = ()
) -> tuple[Quantized | None, Quantized | None]:
    """(rowwise, columnwise) of a 2-D tensor that is already in its compute dtype; None where no GEMM reads it.

    ``high_precision`` names GEMMs that the recipe was asked to leave alone besides its own. A weight has no rowwise
    codes to derive columns from where fprop is one of them.
    """
    spec = spec_of(recipe, operand)
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


def values(recipe: str, operand: str, tensor: torch.Tensor, high_precision=()) -> tuple[np.ndarray, ...]:
    """What a layer's readers of the rowwise and of the columnwise usage multiply."""
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


def linear(recipe: str, x, w, dy, bias=None, high_precision: Collection[str] = ()) -> dict[str, Product]:
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
