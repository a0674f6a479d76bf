"""What the kernels share: the reference's rules for scales and codes, and how a tile moves.

A tile is read as two halves, its even and its odd rows. Transposed, the codes of a column in two neighbouring rows are
neighbours, so they are cast and travel as one 16-bit word: Triton transposes 16-bit tiles with ldmatrix, 8-bit ones
byte by byte.
"""

import triton
import triton.language as tl

from f8sub.kernels.scales import largest_scale, smallest_scale
from f8sub.kernels.triton.division import divided

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


@triton.jit
def finite_or_nan(x):
    """Of float32 elements: NaN for infinity, everything else unchanged, -0 too."""
    return x + x * 0.0


@triton.jit
def magnitude_bits(x):
    """Of float32 elements: integers that order as the magnitudes do, NaN's after infinity's."""
    return x.to(tl.int32, bitcast=True) & MAGNITUDE_BITS


@triton.jit
def larger_magnitude(even, odd):
    """Elementwise; NaN where both are."""
    return tl.maximum(tl.abs(even), tl.abs(odd))


@triton.jit
def amax_bits(x):
    """An amax as an integer that orders as it does; 0 where it is NaN because no element is finite."""
    return tl.where(x > 0.0, x, 0.0).to(tl.int32, bitcast=True)


@triton.jit
def scale_from_amax(amax, TOP: tl.constexpr, POWER_OF_2: tl.constexpr):
    """``scales.scale_from_amax``, float32; 1 where ``amax`` is NaN because no element is finite.

    Rounded to nearest as IEEE has it, a float32 quotient is the float64 one rounded to float32: 53 bits are more than
    twice 24 and two. The power of two below a quotient has the difference of the exponents, less one where the
    mantissas' difference borrows; what is within half an ulp of the next power of two is that power itself.
    """
    if POWER_OF_2:
        TOP_BITS: tl.constexpr = E4M3_TOP_BITS if TOP == 448.0 else E5M2_TOP_BITS
        over_one = tl.minimum(-(amax.to(tl.int32, bitcast=True) - TOP_BITS), LARGEST_SCALE_OVER_ONE_BITS)
        scale = ((over_one + ONE_BITS) & EXPONENT_BITS).to(tl.float32, bitcast=True)
    else:
        # No larger than LARGEST_SCALE where amax is no smaller, and of sixteenths no reciprocal is subnormal.
        bounded = tl.maximum(amax, TOP / LARGEST_SCALE)
        scale = divided(TOP * 0.0625, bounded * 0.0625)
    return tl.where(amax > 0.0, scale, 1.0)


@triton.jit
def first_scale(amax, TOP: tl.constexpr, POWER_OF_2: tl.constexpr, HEADROOM: tl.constexpr):
    """``scales.scale_with_margin``; HEADROOM is two to the power of the margin."""
    exact = tl.full((), TOP, tl.float64) / (amax.to(tl.float64) * HEADROOM)
    scale = tl.minimum(exact, LARGEST_SCALE).to(tl.float32)
    if POWER_OF_2:
        scale = (scale.to(tl.int32, bitcast=True) & EXPONENT_BITS).to(tl.float32, bitcast=True)
    return tl.maximum(tl.where(amax == 0.0, 1.0, scale), SMALLEST_SCALE)


@triton.jit
def scale_from_prior(
    prior, amax, TOP: tl.constexpr, POWER_OF_2: tl.constexpr, HEADROOM: tl.constexpr, COVERS: tl.constexpr
):
    """``scales.scale_now``; HEADROOM is two to the power of the margin.

    ``amax`` counts where there is no prior scale, and where the scale COVERS it.
    """
    scale = prior
    if prior == 0.0:
        scale = first_scale(amax, TOP, POWER_OF_2, HEADROOM)
    if COVERS:
        scale = tl.where(amax == 0.0, scale, tl.minimum(scale, scale_from_amax(amax, TOP, POWER_OF_2)))
    return scale


@triton.jit
def inverse(scale, POWER_OF_2: tl.constexpr):
    """``1 / scale``, rounded to nearest, of scales from SMALLEST_SCALE to LARGEST_SCALE."""
    if POWER_OF_2:
        return (-(scale.to(tl.int32, bitcast=True) - TWO_ONES_BITS)).to(tl.float32, bitcast=True)
    return divided(1.0, scale)


@triton.jit
def scaled(x, scale, TOP: tl.constexpr, SATURATE: tl.constexpr):
    """Elements as they are cast, float32: ``finite_or_nan`` ones, or values of codes, which may be infinite.

    SATURATE where ``scale`` is not of these elements' own amax: else no product rounds to more than TOP.
    """
    # As ``reference.dequantize`` clamps.
    x = tl.clamp(x, -LARGEST_FINITE, LARGEST_FINITE, propagate_nan=NAN) * scale
    if SATURATE:
        x = tl.clamp(x, -TOP, TOP, propagate_nan=NAN)
    return x


@triton.jit
def codes(x, CODES: tl.constexpr):
    """``reference.cast`` of ``scaled`` elements, as bytes."""
    return x.to(CODES).to(tl.uint8, bitcast=True)


@triton.jit
def words(even, odd, CODES: tl.constexpr):
    """``reference.cast`` of the ``scaled`` elements of two rows, those of one column in one 16-bit word.

    Cast as pairs, for which there is one instruction. Put together from ``codes`` they would be read as halves of words
    and by themselves, and then ptxas 12.8, Triton 3.6's and 3.7's, reads some of them from a register it never wrote.
    """
    low, high = tl.split(codes(tl.join(even, odd), CODES))
    return low.to(tl.uint16) | (high.to(tl.uint16) << 8)


@triton.jit
def place(index, M, N, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr):
    """First row and column of the tile with that number, in row-major order."""
    tiles_in_a_row = tl.cdiv(N, TILE_COLS)
    return (index // tiles_in_a_row) * TILE_ROWS, (index % tiles_in_a_row) * TILE_COLS


@triton.jit
def load_halves(
    x_ptr, row, col, M, N, ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr, KEEP: tl.constexpr
):
    """Even and odd rows of the (ROWS, COLS) tile at (row, col), float32, zeros beyond the matrix.

    WHOLE says that all tiles lie within it; KEEP is how L2 is to treat what was read.
    """
    i, j = 2 * tl.arange(0, ROWS // 2), tl.arange(0, COLS)
    pointers = x_ptr + row.to(tl.int64) * N + col + i[:, None] * N + j[None, :]
    if WHOLE:
        even = tl.load(pointers, eviction_policy=KEEP)
        odd = tl.load(pointers + N, eviction_policy=KEEP)
    else:
        inside = (col + j < N)[None, :]
        even = tl.load(pointers, mask=inside & (row + i < M)[:, None], other=0.0, eviction_policy=KEEP)
        odd = tl.load(pointers + N, mask=inside & (row + i + 1 < M)[:, None], other=0.0, eviction_policy=KEEP)
    return even.to(tl.float32), odd.to(tl.float32)


@triton.jit
def load_finite_halves(
    x_ptr, row, col, M, N, ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr, KEEP: tl.constexpr
):
    """``load_halves``, ``finite_or_nan``."""
    even, odd = load_halves(x_ptr, row, col, M, N, ROWS, COLS, WHOLE, KEEP)
    return finite_or_nan(even), finite_or_nan(odd)


@triton.jit
def store_halves(
    out_ptr, even, odd, row, col, M, N, ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr
):
    """Codes of a tile's halves to the rowwise operand, (M, N)."""
    i, j = 2 * tl.arange(0, ROWS // 2), tl.arange(0, COLS)
    pointers = out_ptr + row.to(tl.int64) * N + col + i[:, None] * N + j[None, :]
    if WHOLE:
        tl.store(pointers, even)
        tl.store(pointers + N, odd)
    else:
        inside = (col + j < N)[None, :]
        tl.store(pointers, even, mask=inside & (row + i < M)[:, None])
        tl.store(pointers + N, odd, mask=inside & (row + i + 1 < M)[:, None])


@triton.jit
def store_transposed(
    out_ptr, words, row, col, M, N, ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr
):
    """``words`` of a tile's halves to the columnwise operand, (N, M); as such where ``out_ptr`` points to words.

    It does where M is even, so that every word lies within one row.
    """
    i, j = tl.arange(0, ROWS // 2), tl.arange(0, COLS)
    words = tl.trans(words)
    if out_ptr.dtype.element_ty == tl.uint16:
        pointers = out_ptr + col.to(tl.int64) * (M // 2) + row // 2 + j[:, None] * (M // 2) + i[None, :]
        if WHOLE:
            tl.store(pointers, words)
        else:
            tl.store(pointers, words, mask=(col + j < N)[:, None] & (row // 2 + i < M // 2)[None, :])
    else:
        pointers = out_ptr + col.to(tl.int64) * M + row + j[:, None] * M + 2 * i[None, :]
        inside = (col + j < N)[:, None]
        tl.store(pointers, (words & 0xFF).to(tl.uint8), mask=inside & (row + 2 * i < M)[None, :])
        tl.store(pointers + 1, (words >> 8).to(tl.uint8), mask=inside & (row + 2 * i + 1 < M)[None, :])


@triton.jit
def store_with_one(
    row_ptr,
    col_ptr,
    even,
    odd,
    scale,
    row,
    col,
    M,
    N,
    TOP: tl.constexpr,
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SATURATE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Cast a tile's halves with one scale and store them for each usage whose pointer is not None."""
    even, odd = scaled(even, scale, TOP, SATURATE), scaled(odd, scale, TOP, SATURATE)
    if row_ptr is not None:
        store_halves(row_ptr, codes(even, CODES), codes(odd, CODES), row, col, M, N, ROWS, COLS, WHOLE)
    if col_ptr is not None:
        store_transposed(col_ptr, words(even, odd, CODES), row, col, M, N, ROWS, COLS, WHOLE)
