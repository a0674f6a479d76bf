"""The format of a float8 operand: element dtype, tile, scale rule. Pure data, no arithmetic on tensors.

One scale a tensor is ``Tile(ALL, ALL)``, one a row ``Tile(1, ALL)``, one for 128x128 elements ``Tile(128, 128)``.
"""

import functools
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeVar

import torch

from f8sub.errors import Float8ConfigError

ALL = -1
"""A tile edge that spans the whole dimension."""

HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that can be quantized: those whose products with a scale float32 holds."""

MULTIPLE = 16
"""Both dimensions of a float8 GEMM operand. Source: cuBLASLt, ATen/native/cuda/ScaledBlas.cpp."""

E2M1 = torch.float4_e2m1fn_x2
"""Four bits an element, two to a byte, the first in the low half: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign; no NaN."""

_NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", E2M1: "e2m1"}


class ScaleRule(Enum):
    """The values that a scale may take, and how its inverse is stored.

    FLOAT: any float32. POWER_OF_2: powers of two, rounded down, so that a product with a scale is exact and codes can
    be re-scaled. E8M0: the same, the inverse stored as one exponent byte; a scale rounded down is the OCP's exponent
    rounded up, which no element overflows (arXiv 2506.08027: rounded the other way pretraining can diverge). TWO_LEVEL:
    an e4m3 inverse a tile, under one float32 inverse a matrix, ``Operand.global_scale_inv`` (NVFP4, arXiv 2509.25149).
    """

    FLOAT = "float"
    POWER_OF_2 = "power_of_2"
    E8M0 = "e8m0"
    TWO_LEVEL = "two_level"

    @property
    def stored_as(self) -> torch.dtype:
        """The dtype of ``Operand.scale_inv``."""
        if self is ScaleRule.E8M0:
            return torch.float8_e8m0fnu
        return torch.float8_e4m3fn if self is ScaleRule.TWO_LEVEL else torch.float32

    @property
    def has_global(self) -> bool:
        """True if ``Operand.global_scale_inv`` is there."""
        return self is ScaleRule.TWO_LEVEL

    @property
    def is_power_of_2(self) -> bool:
        """True if a product with a scale only moves the exponent."""
        return self in (ScaleRule.POWER_OF_2, ScaleRule.E8M0)


class Rounding(Enum):
    """How a scaled value becomes a code: NEAREST, ties to even; or STOCHASTIC, one of its two neighbours at random.

    The mean is right then. The numbers are torch's default generator's.
    """

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of the block of elements that share one scale, over a (rows, cols) matrix.

    The last tile of a dimension that ``rows`` or ``cols`` does not divide is a smaller one. ``is_whole`` follows:
    whether one scale serves the whole matrix. An edge that is neither positive nor ``ALL`` is a ``Float8ConfigError``.
    """

    rows: int
    cols: int
    is_whole: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for edge in (self.rows, self.cols):
            # Not isinstance: True is an int.
            if type(edge) is not int or (edge != ALL and edge < 1):
                raise Float8ConfigError(f"a tile edge is a positive number of elements or ALL, got {self}")
        # The class is frozen.
        object.__setattr__(self, "is_whole", self.rows == self.cols == ALL)

    def t(self) -> "Tile":
        """The same block of elements, seen in the transposed matrix."""
        return Tile(self.cols, self.rows)

    def is_transpose_of(self, other: "Tile") -> bool:
        """Return whether both put the same elements under one scale, one seen in the transposed matrix."""
        return self.rows == other.cols and self.cols == other.rows

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Number of tiles along each dimension of a matrix of ``shape``."""
        down = 1 if self.rows == ALL else -(-shape[0] // self.rows)
        return down, 1 if self.cols == ALL else -(-shape[1] // self.cols)

    def check_cut(self, dim: int, whole: int, part: int, matrix: str) -> None:
        """Check that parts of a matrix are whole tiles each, or lie within one; else it is a ``Float8ConfigError``.

        Args:
            dim: the dimension that is cut.
            whole: the matrix's extent along it.
            part: the extent of all parts but the last ones.
            matrix: how an error calls it.
        """
        edge = (self.rows, self.cols)[dim]
        # Parts of whole tiles are right, and so are parts within one tile, and a matrix no larger than a tile.
        if edge != ALL and part and part % edge and edge % part and whole > edge:
            raise Float8ConfigError(
                f"{matrix} is cut into parts of {part} of {whole} {('rows', 'columns')[dim]}, and a scale's tile has "
                f"{edge}: parts that are neither whole tiles nor lie within one have no scales of their own; take "
                "a degree of parallelism that cuts between tiles, or a recipe with other tiles"
            )

    def __str__(self) -> str:
        return "x".join("all" if edge == ALL else str(edge) for edge in (self.rows, self.cols))


@dataclass(frozen=True, slots=True)
class Float8Format:
    """How one GEMM operand is stored, as a (rows, K) matrix that is contracted along K.

    Attributes:
        dtype: ``torch.float8_e4m3fn``, ``torch.float8_e5m2`` or ``torch.float4_e2m1fn_x2``.
        tile: the block of elements that share a scale.
        scale_rule: which values its scales may take.
        rounding: how values become codes; stochastic for e2m1 only.
        hadamard: the matrix is multiplied along K by a random Hadamard transform of this size before it is cast,
            a power of two; it cancels in a GEMM whose two operands have it. None for none.

        name: all of it in one word that ``parse`` reads, ``e4m3[1x128,power_of_2]``.
        is_plain: whether torch computes with it: codes of a byte, float32 scales of one level, no transform.

    Raises:
        Float8ConfigError: another dtype, what is not defined for the dtype, or a tile or rule of another type.
    """

    dtype: torch.dtype
    tile: Tile
    scale_rule: ScaleRule = ScaleRule.FLOAT
    rounding: Rounding = Rounding.NEAREST
    hadamard: int | None = None
    name: str = field(init=False, compare=False, repr=False)
    is_plain: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.dtype not in _NAMES:
            raise Float8ConfigError(f"a float8 format has a dtype of {list(_NAMES)}, got {self.dtype}")
        for value, kind in ((self.tile, Tile), (self.scale_rule, ScaleRule), (self.rounding, Rounding)):
            if not isinstance(value, kind):
                raise Float8ConfigError(f"a float8 format takes a {kind.__name__}, got {value!r}")
        if self.rounding is Rounding.STOCHASTIC and self.dtype != E2M1:
            raise Float8ConfigError(f"stochastic rounding is defined for {E2M1}, got {self.dtype}")
        if self.hadamard is not None and (self.hadamard < 2 or self.hadamard & (self.hadamard - 1)):
            raise Float8ConfigError(f"a Hadamard transform has a power of two as size, got {self.hadamard}")
        words = [str(self.tile)]
        words += [] if self.scale_rule is ScaleRule.FLOAT else [self.scale_rule.value]
        words += [] if self.rounding is Rounding.NEAREST else [self.rounding.value]
        words += [] if self.hadamard is None else [f"hadamard{self.hadamard}"]
        object.__setattr__(self, "name", f"{_NAMES[self.dtype]}[{','.join(words)}]")
        plain = self.dtype != E2M1 and self.scale_rule.stored_as == torch.float32 and self.hadamard is None
        object.__setattr__(self, "is_plain", plain)

    def __hash__(self) -> int:
        # It names every field that is compared, and Python hashes a string once.
        return hash(self.name)

    @classmethod
    # Cached, because operators parse the formats of their operands in every call.
    @functools.cache
    def parse(cls, name: str) -> "Float8Format":
        """The format of that name; any other word is a ``Float8ConfigError``."""
        found = _NAME.fullmatch(name)
        if found is None:
            raise Float8ConfigError(f"a format is called like 'e4m3[1x128,power_of_2]', got {name!r}")
        dtype = next(dtype for dtype, word in _NAMES.items() if word == found["dtype"])
        rows, cols = (ALL if edge == "all" else int(edge) for edge in (found["rows"], found["cols"]))
        rule, rounding = ScaleRule(found["rule"] or "float"), Rounding(found["rounding"] or "nearest")
        size = None if found["hadamard"] is None else int(found["hadamard"])
        return cls(dtype, Tile(rows, cols), rule, rounding, size)

    @property
    def max(self) -> float:
        """Largest finite value of ``dtype``: 448 for e4m3, 57344 for e5m2, 6 for e2m1."""
        # Written in code, not stored: see the note on numbers in ``kernels/reference.py``.
        return 6.0 if self.dtype == E2M1 else torch.finfo(self.dtype).max

    def is_transpose_of(self, other: "Float8Format") -> bool:
        """Return whether a matrix has the codes and scales in this format that its transpose has in the other."""
        return (
            (self.dtype, self.hadamard) == (other.dtype, other.hadamard)
            and (self.scale_rule, self.rounding) == (other.scale_rule, other.rounding)
            and self.tile.is_transpose_of(other.tile)
        )

    @property
    def has_nan(self) -> bool:
        """True if a code can stand for NaN; e2m1's cannot."""
        return self.dtype != E2M1

    @property
    def codes_per_byte(self) -> int:
        """Elements in one byte of ``Operand.data``, side by side along K."""
        return 2 if self.dtype == E2M1 else 1

    @property
    def depth_multiple(self) -> int:
        """K is filled up with zeros to a multiple of this, so that bytes and transforms are whole."""
        return max(self.codes_per_byte, self.hadamard or 1)

    def __str__(self) -> str:
        """Return the name that the documentation uses: ``1x128 e4m3 (power-of-two scales)``."""
        rounding = None if self.rounding is Rounding.NEAREST else self.rounding.value
        hadamard = None if self.hadamard is None else f"Hadamard {self.hadamard}"
        more = ", ".join(filter(None, (_IN_WORDS.get(self.scale_rule), rounding, hadamard)))
        words = f"{_TILE_NAMES.get(self.tile, self.tile)} {_NAMES[self.dtype]}"
        return f"{words} ({more})" if more else words


_TILE_NAMES = {Tile(ALL, ALL): "tensorwise", Tile(1, ALL): "rowwise"}

_IN_WORDS = {
    ScaleRule.POWER_OF_2: "power-of-two scales",
    ScaleRule.E8M0: "e8m0 scales",
    ScaleRule.TWO_LEVEL: "two-level scales",
}

# What ``Float8Format.name`` is put together as.
_NAME = re.compile(
    rf"(?P<dtype>{'|'.join(_NAMES.values())})"
    r"\[(?P<rows>all|\d+)x(?P<cols>all|\d+)"
    rf"(,(?P<rule>{'|'.join(rule.value for rule in ScaleRule)}))?"
    rf"(,(?P<rounding>{'|'.join(rounding.value for rounding in Rounding)}))?"
    r"(,hadamard(?P<hadamard>\d+))?\]"
)


ALIGNMENT = 16
"""Bytes that a row and its scales are filled up to: NCCL is slow and tensor cores refuse what is not aligned so."""


def lies_in_rows(tile: Tile) -> bool:
    """Return whether each row of a matrix has several tiles of its own, as 1x128 and 1x32 do."""
    return tile.rows == 1 and tile.cols != ALL


def bytes_of_row(format: Float8Format, cols: int, with_scales: bool) -> int:
    """Return the bytes of a row on the wire: its data, and behind them its scales where they are sent with it."""
    codes = cols // format.codes_per_byte
    if not with_scales:
        return codes
    tiles = format.tile.scale_shape((1, cols))[1]
    return aligned(aligned(codes) + tiles * format.scale_rule.stored_as.itemsize)


def aligned(size: int) -> int:
    """Return a number of bytes, filled up to ``ALIGNMENT``."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def share_scale(rowwise: Float8Format | None, columnwise: Float8Format | None) -> bool:
    """Return whether one scale, in one tensor, serves both usages of a matrix."""
    return rowwise is not None and rowwise.is_plain and rowwise.tile.is_whole and rowwise == columnwise


class Operand(NamedTuple):
    """One GEMM-ready matrix.

    Attributes:
        data: codes, (rows, K), contracted along K; (rows, K / 2) where two share a byte. Row-major, as Hopper's
            tensor cores take it; a transposed view only where it was asked for because the GEMM that reads it
            takes any layout.
        scale_inv: ``format.scale_rule.stored_as``, ``format.tile.scale_shape`` of (rows, K), always 2-D (but for the
            note in ``kernels/ops.py``); multiplies codes to get back the high-precision values.
        format: how ``data`` and ``scale_inv`` are to be read.
        global_scale_inv: float32, (1, 1), multiplies too, where the format's scales have two levels; else None.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor
    format: Float8Format
    global_scale_inv: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, K), in elements."""
        rows, cols = self.data.shape
        return rows, cols * self.format.codes_per_byte

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Its tensors; ``Operand.of(format, *tensors)`` makes it again."""
        found = (self.data, self.scale_inv)
        return found if self.global_scale_inv is None else (*found, self.global_scale_inv)

    @classmethod
    def of(cls, format: Float8Format, data: torch.Tensor, *scales: torch.Tensor) -> "Operand":
        """The operand of a format, from ``tensors``."""
        return cls(data, scales[0], format, *scales[1:])


Present = TypeVar("Present")


def present(operand: Present | None) -> Present:
    """Return what a recipe, or a tensor's kind, says is there; never None."""
    if operand is None:
        raise RuntimeError("a float8 tensor lacks the operand that is to be read")
    return operand


def why_not_derivable(rowwise: Float8Format, columnwise: Float8Format) -> str | None:
    """Why a columnwise operand cannot be made from rowwise codes without rounding twice; None when it can.

    Two ways are exact. When both formats put the same elements under one scale, the bytes are transposed.
    When both have power-of-two scales, the codes are re-scaled: a product with a power of two only moves the
    exponent, so nothing is rounded again except what falls into the subnormals of its new tile.
    """
    if rowwise.dtype != columnwise.dtype:
        return f"the element dtypes differ: {rowwise} and {columnwise}"
    if rowwise.hadamard or columnwise.hadamard:
        return f"a Hadamard transform runs along the rows of one and the columns of the other: {rowwise}, {columnwise}"
    same_elements = rowwise.tile.is_transpose_of(columnwise.tile)
    if rowwise.scale_rule is columnwise.scale_rule and (same_elements or rowwise.scale_rule.is_power_of_2):
        return None
    return (
        f"{rowwise} and {columnwise} do not put the same elements under one scale, and re-scaling would round "
        "twice because the scales are not powers of two"
    )
