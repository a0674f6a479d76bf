"""Rules for scales and casts that kernels share with the reference, and how a tile moves.

A tile is read as two halves, its even and its odd rows. A kernel's signature names what a launch brings, then, from a
new line, what it is compiled for.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from f8sub.kernels.scales import largest_scale, smallest_scale
from f8sub.kernels.triton import triton_compat

LARGEST_FINITE = tl.constexpr(float.fromhex("0x1.fffffep127"))
LARGEST_SCALE = tl.constexpr(largest_scale())
SMALLEST_SCALE = tl.constexpr(smallest_scale())
E4M3_TOP_BITS = tl.constexpr(0x43E00000)
E5M2_TOP_BITS = tl.constexpr(0x47600000)
EXPONENT_BITS = tl.constexpr(0x7F800000)
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
ONE_BITS = tl.constexpr(0x3F800000)
LARGEST_SCALE_OVER_ONE_BITS = tl.constexpr(126 << 23)
TWO_ONES_BITS = tl.constexpr(2 * 0x3F800000)
NAN = tl.constexpr(tl.PropagateNan.ALL)
INTERPRETED = tl.constexpr(triton_compat.INTERPRETED)


# Hashed at every launch, so by identity: there is one of each value.
@dataclass(frozen=True, slots=True, eq=False)
class Cast:
    """Describes what a kernel casts to, known when it is compiled.

    Attributes:
        TOP: the largest finite value of the format.
        CODES: dtype of the quantized data.
        POWER_OF_2: whether scales are powers of two.
    """

    TOP: float
    CODES: tl.dtype
    POWER_OF_2: bool


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """The (ROWS, COLS) elements that a program has at a time. If WHOLE, no such tile reaches beyond the matrix."""

    ROWS: int
    COLS: int
    WHOLE: bool


class At(NamedTuple):
    """The place where a tile begins in an (M, N) matrix; the four are scalars of a kernel."""

    row: Any
    col: Any
    M: Any
    N: Any


@triton.jit
def _approximate_reciprocal(x):
    if INTERPRETED:
        return tl.div_rn(1.0, x)
    else:
        # Of 2**-126 to 2**126 no more than the last bit is wrong. Source: PTX ISA, rcp.approx.f32.
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _divided(dividend, divisor):
    """Return the quotient of two float32 numbers, rounded to nearest as IEEE has it, without a branch.

    These are the multiplications that ptxas 12.8 makes of div.rn.f32, without its branch to numbers out of range:
    neither a divisor, nor its reciprocal, nor a quotient may be subnormal or overflow.
    """
    # A Newton step makes the reciprocal exact to the last bit, and the remainder of the
    # quotient corrects its rounding.
    over_divisor, minus_divisor = _approximate_reciprocal(divisor), divisor * -1.0
    over_divisor = tl.fma(over_divisor, tl.fma(minus_divisor, over_divisor, 1.0), over_divisor)
    near = dividend * over_divisor
    return tl.fma(tl.fma(minus_divisor, near, dividend), over_divisor, near)


@triton.jit
def finite_or_nan(x):
    """Return NaN for infinity, and everything else unchanged, -0 too; float32."""
    # inf * 0 is NaN; a finite x gets 0 added, of its own sign.
    return x + x * 0.0


@triton.jit
def magnitude_bits(x):
    """Return integers that order as the magnitudes of float32 elements do; NaN comes after infinity."""
    return x.to(tl.int32, bitcast=True) & MAGNITUDE_BITS


@triton.jit
def larger_magnitude(even, odd):
    """Return the larger magnitude, elementwise; NaN where both are NaN."""
    return tl.maximum(tl.abs(even), tl.abs(odd))


@triton.jit
def amax_bits(x):
    """Return integers that order as amaxes do; 0 where an amax is NaN because no element is finite."""
    return tl.where(x > 0.0, x, 0.0).to(tl.int32, bitcast=True)


@triton.jit
def scale_from_amax(amax, CAST: tl.constexpr):
    """Return ``scales.scale_from_amax``, float32; 1 where ``amax`` is NaN because no element is finite.

    A float32 quotient that is rounded to nearest is the float64 quotient rounded to float32, because 53 bits are more
    than twice 24 and two. The exponent of the power of two below a quotient is the difference of the exponents, less
    one where the mantissas' difference borrows; a quotient within half an ulp of the next power of two gives that.
    """
    if CAST.POWER_OF_2:
        TOP_BITS: tl.constexpr = E4M3_TOP_BITS if CAST.TOP == 448.0 else E5M2_TOP_BITS
        # TOP's bits less the amax's: the quotient's exponent above that of 1, and a
        # mantissa that the mask below drops.
        over_one = tl.minimum(-(amax.to(tl.int32, bitcast=True) - TOP_BITS), LARGEST_SCALE_OVER_ONE_BITS)
        scale = ((over_one + ONE_BITS) & EXPONENT_BITS).to(tl.float32, bitcast=True)
    else:
        # The bound keeps the scale at LARGEST_SCALE, and a sixteenth has no subnormal reciprocal.
        bounded = tl.maximum(amax, CAST.TOP / LARGEST_SCALE)
        scale = _divided(CAST.TOP * 0.0625, bounded * 0.0625)
    return tl.where(amax > 0.0, scale, 1.0)


@triton.jit
def first_scale(amax, CAST: tl.constexpr, HEADROOM: tl.constexpr):
    """Return ``scales.scale_with_margin`` of an amax, float32; HEADROOM is two to the power of the margin."""
    # In float64, as the reference divides: there is one of these per scale, not per element.
    exact = tl.full((), CAST.TOP, tl.float64) / (amax.to(tl.float64) * HEADROOM)
    scale = tl.minimum(exact, LARGEST_SCALE).to(tl.float32)
    if CAST.POWER_OF_2:
        scale = (scale.to(tl.int32, bitcast=True) & EXPONENT_BITS).to(tl.float32, bitcast=True)
    return tl.maximum(tl.where(amax == 0.0, 1.0, scale), SMALLEST_SCALE)


@triton.jit
def scale_from_prior(prior, amax, CAST: tl.constexpr, HEADROOM: tl.constexpr, COVERS: tl.constexpr):
    """Return ``scales.scale_now``: ``amax`` counts where there is no prior scale, and where the scale COVERS it."""
    scale = prior
    # 0 is no scale: none was computed yet.
    if prior == 0.0:
        scale = first_scale(amax, CAST, HEADROOM)
    # A weight's scale may be old, but no element may exceed the range.
    if COVERS:
        scale = tl.where(amax == 0.0, scale, tl.minimum(scale, scale_from_amax(amax, CAST)))
    return scale


@triton.jit
def inverse(scale, POWER_OF_2: tl.constexpr):
    """Return ``1 / scale``, rounded to nearest, of scales from SMALLEST_SCALE to LARGEST_SCALE."""
    if POWER_OF_2:
        # A power of two has only an exponent, e + 127: its inverse's is 254 less that.
        return (-(scale.to(tl.int32, bitcast=True) - TWO_ONES_BITS)).to(tl.float32, bitcast=True)
    return _divided(1.0, scale)


@triton.jit
def scaled(x, scale, CAST: tl.constexpr, SATURATE: tl.constexpr):
    """Return elements as they are cast, float32; ``x`` is finite or NaN, or dequantized values, which may be infinite.

    SATURATE where ``scale`` was not computed from the amax of these elements; else no product rounds to more than TOP.
    """
    # ``reference.dequantize`` clamps so.
    x = tl.clamp(x, -LARGEST_FINITE, LARGEST_FINITE, propagate_nan=NAN) * scale
    if SATURATE:
        x = tl.clamp(x, -CAST.TOP, CAST.TOP, propagate_nan=NAN)
    return x


@triton.jit
def codes(x, CODES: tl.constexpr):
    """Return ``reference.cast`` of ``scaled`` elements, as bytes."""
    return x.to(CODES).to(tl.uint8, bitcast=True)


@triton.jit
def _words(even, odd, CODES: tl.constexpr):
    # One 16-bit word for the two rows of a column. There is one instruction that casts a pair. If words were put
    # together from ``codes``, which are also stored by themselves, ptxas 12.8 (of Triton 3.6 and 3.7) would read some
    # of them from a register that it never wrote.
    low, high = tl.split(codes(tl.join(even, odd), CODES))
    return low.to(tl.uint16) | (high.to(tl.uint16) << 8)


@triton.jit
def place(index, M, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return the tile with that number, in row-major order."""
    tiles_in_a_row = tl.cdiv(N, COLS)
    return At((index // tiles_in_a_row) * ROWS, (index % tiles_in_a_row) * COLS, M, N)


@triton.jit
def place_in_stack(index, M, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return a tile among those of many (M, N) matrices, by its number: its matrix's, int64, and the tile in that."""
    tiles = tl.cdiv(M, ROWS) * tl.cdiv(N, COLS)
    return (index // tiles).to(tl.int64), place(index % tiles, M, N, ROWS, COLS)


@triton.jit
def moved(at, rows, cols):
    """Return the tile that begins so many rows and columns later."""
    return At(at.row + rows, at.col + cols, at.M, at.N)


@triton.jit
def row_taken(index_ptr, line, is_line):
    """Return which rows of x, int64, those that are cast are: ``rows`` of ``operands.Taken``."""
    return tl.load(index_ptr + line, mask=is_line, other=0).to(tl.int64)


@triton.jit
def factor_of(factor_ptr, line, is_line):
    """Return the factors of rows, float32: ``factors`` of ``operands.Taken``."""
    return tl.load(factor_ptr + line, mask=is_line, other=0.0).to(tl.float32)


@triton.jit
def load(pointers, inside, WHOLE: tl.constexpr, KEEP: tl.constexpr, OTHER: tl.constexpr = 0):
    """Load what is ``inside`` a matrix, all of it if WHOLE, and OTHER beyond it.

    KEEP tells L2 what to do with what was read.
    """
    if WHOLE:
        # Without a mask, whose runs of equal bits Triton may not know, it loads 16 bytes at a time.
        return tl.load(pointers, eviction_policy=KEEP)
    else:
        return tl.load(pointers, mask=inside, other=OTHER, eviction_policy=KEEP)


@triton.jit
def store(pointers, values, inside, WHOLE: tl.constexpr):
    """Write what lies ``inside`` a matrix; all of it if WHOLE."""
    if WHOLE:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=inside)


@triton.jit
def load_halves(x_ptr, at, TILE: tl.constexpr, KEEP: tl.constexpr):
    """Load even and odd rows of a tile, float32, each (ROWS / 2, COLS); see ``load``."""
    i, j = 2 * tl.arange(0, TILE.ROWS // 2), tl.arange(0, TILE.COLS)
    # int64: a matrix may have more than 2**31 elements.
    pointers = x_ptr + at.row.to(tl.int64) * at.N + at.col + i[:, None] * at.N + j[None, :]
    inside = (at.col + j < at.N)[None, :]
    even = load(pointers, inside=inside & (at.row + i < at.M)[:, None], WHOLE=TILE.WHOLE, KEEP=KEEP)
    second = inside & (at.row + i + 1 < at.M)[:, None]
    odd = load(pointers + at.N, inside=second, WHOLE=TILE.WHOLE, KEEP=KEEP)
    return even.to(tl.float32), odd.to(tl.float32)


@triton.jit
def load_finite_halves(x_ptr, at, TILE: tl.constexpr, KEEP: tl.constexpr):
    """Load as ``load_halves``, with NaN for infinity."""
    even, odd = load_halves(x_ptr, at, TILE, KEEP)
    return finite_or_nan(even), finite_or_nan(odd)


@triton.jit
def store_rows(
    row_ptr, even, odd, even_scale, odd_scale, at,
    CAST: tl.constexpr, TILE: tl.constexpr, SATURATE: tl.constexpr,
):  # fmt: skip
    """Cast a tile's halves and store them in the rowwise operand, (M, N)."""
    even = codes(scaled(even, even_scale, CAST, SATURATE), CAST.CODES)
    odd = codes(scaled(odd, odd_scale, CAST, SATURATE), CAST.CODES)
    i, j = 2 * tl.arange(0, TILE.ROWS // 2), tl.arange(0, TILE.COLS)
    pointers = row_ptr + at.row.to(tl.int64) * at.N + at.col + i[:, None] * at.N + j[None, :]
    inside = (at.col + j < at.N)[None, :]
    store(pointers, even, inside=inside & (at.row + i < at.M)[:, None], WHOLE=TILE.WHOLE)
    store(pointers + at.N, odd, inside=inside & (at.row + i + 1 < at.M)[:, None], WHOLE=TILE.WHOLE)


@triton.jit
def store_columns(
    col_ptr, even, odd, scale, at, CAST: tl.constexpr, TILE: tl.constexpr, SATURATE: tl.constexpr
):
    """Cast a tile's halves and store them in the columnwise operand, (N, M).

    ``col_ptr`` points to 16-bit words where M is even, so that every word lies within one row.
    """
    even, odd = scaled(even, scale, CAST, SATURATE), scaled(odd, scale, CAST, SATURATE)
    # In the transposed matrix the elements of two neighbouring rows are neighbours, so they are cast and moved as one
    # 16-bit word: Triton transposes 16-bit tiles with ldmatrix, and 8-bit tiles byte by byte.
    words = tl.trans(_words(even, odd, CAST.CODES))
    i, j = tl.arange(0, TILE.ROWS // 2), tl.arange(0, TILE.COLS)
    if col_ptr.dtype.element_ty == tl.uint16:
        # words [N, M / 2]
        start = col_ptr + at.col.to(tl.int64) * (at.M // 2) + at.row // 2
        pointers = start + j[:, None] * (at.M // 2) + i[None, :]
        inside = (at.col + j < at.N)[:, None] & (at.row // 2 + i < at.M // 2)[None, :]
        store(pointers, words, inside, TILE.WHOLE)
    else:
        # M is odd: words would cross rows of the result, so their bytes are stored one by one.
        pointers = col_ptr + at.col.to(tl.int64) * at.M + at.row + j[:, None] * at.M + 2 * i[None, :]
        inside = (at.col + j < at.N)[:, None]
        low, high = (words & 0xFF).to(tl.uint8), (words >> 8).to(tl.uint8)
        tl.store(pointers, low, mask=inside & (at.row + 2 * i < at.M)[None, :])
        tl.store(pointers + 1, high, mask=inside & (at.row + 2 * i + 1 < at.M)[None, :])


@triton.jit
def store_zero_columns(col_ptr, at, TILE: tl.constexpr):
    """Store a tile of zeros in the columnwise operand, as ``store_columns``; ``col_ptr`` points to 16-bit words."""
    HALF: tl.constexpr = TILE.ROWS // 2
    COLS: tl.constexpr = TILE.COLS
    i, j = tl.arange(0, HALF), tl.arange(0, COLS)
    start = col_ptr + at.col.to(tl.int64) * (at.M // 2) + at.row // 2
    inside = (at.col + j < at.N)[:, None] & (at.row // 2 + i < at.M // 2)[None, :]
    zeros = tl.zeros((COLS, HALF), tl.uint16)
    store(start + j[:, None] * (at.M // 2) + i[None, :], zeros, inside, TILE.WHOLE)


@triton.jit
def store_with_one(
    row_ptr, col_ptr, even, odd, scale, at, CAST: tl.constexpr, TILE: tl.constexpr, SATURATE: tl.constexpr
):
    """Cast a tile's halves with one scale and store them for each usage whose pointer is not None."""
    if row_ptr is not None:
        store_rows(row_ptr, even, odd, scale, scale, at, CAST, TILE, SATURATE)
    if col_ptr is not None:
        store_columns(col_ptr, even, odd, scale, at, CAST, TILE, SATURATE)


@triton.jit
def store_scales_of_square(
    row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr, scale_inv, at, EDGE: tl.constexpr
):
    """Store the inverse scale of the square at ``at`` for each usage whose pointer is not None."""
    row, col = at.row // EDGE, at.col // EDGE
    if row_ptr is not None:
        tl.store(row_scale_inv_ptr + row * tl.cdiv(at.N, EDGE) + col, scale_inv)
    if col_ptr is not None:
        # columnwise scales [N / EDGE, M / EDGE] are the rowwise ones transposed
        tl.store(col_scale_inv_ptr + col * tl.cdiv(at.M, EDGE) + row, scale_inv)


@triton.jit
def store_scales_of_group_square(
    row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr, scale_inv, at, EDGE: tl.constexpr
):
    """Store as ``store_scales_of_square``; scales of groups have the same layout for both usages."""
    index = at.row // EDGE * tl.cdiv(at.N, EDGE) + at.col // EDGE
    if row_ptr is not None:
        tl.store(row_scale_inv_ptr + index, scale_inv)
    if col_ptr is not None:
        tl.store(col_scale_inv_ptr + index, scale_inv)
