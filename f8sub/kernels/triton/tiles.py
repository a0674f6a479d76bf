"""Layer 1. What the kernels share: the reference's rules for scales and codes, and how a tile moves.

A tile is read as two halves, its even and its odd rows. Transposed, the codes of a column in two neighbouring rows are
neighbours, so they travel as one 16-bit word: Triton transposes 16-bit tiles with ldmatrix, 8-bit ones byte by byte.
"""

import triton
import triton.language as tl

from f8sub.kernels import reference

LARGEST = tl.constexpr(reference.LARGEST)
LARGEST_SCALE = tl.constexpr(reference.LARGEST_SCALE)
EXPONENT_BITS = tl.constexpr(0x7F800000)
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(float("inf"))
NAN = tl.constexpr(float("nan"))


@triton.jit
def finite_magnitude(x):
    """Of float32 elements: their magnitude, 0 for NaN and infinity, which take no part in an amax."""
    magnitude = tl.abs(x)
    return tl.where(magnitude < INFINITY, magnitude, 0.0)


@triton.jit
def scale_from_amax(amax, TOP: tl.constexpr, POWER_OF_2: tl.constexpr):
    """``reference.scale_from_amax``, float32.

    Rounded to nearest as IEEE has it, a float32 quotient is the float64 one rounded to float32: 53 bits are more than
    twice 24 and two.
    """
    scale = tl.minimum(tl.div_rn(TOP, amax), LARGEST_SCALE)
    if POWER_OF_2:
        scale = (scale.to(tl.int32, bitcast=True) & EXPONENT_BITS).to(tl.float32, bitcast=True)
    return tl.where(amax == 0.0, 1.0, scale)


@triton.jit
def codes(x, scale, TOP: tl.constexpr, CODES: tl.constexpr, SATURATE: tl.constexpr):
    """``reference.cast`` of float32 elements, as bytes.

    SATURATE where ``scale`` is not of these elements' own amax: else no product rounds to more than TOP.
    """
    scaled = tl.clamp(x, -LARGEST, LARGEST) * scale
    if SATURATE:
        scaled = tl.clamp(scaled, -TOP, TOP)
    scaled = tl.where(tl.abs(x) < INFINITY, scaled, NAN)
    return scaled.to(CODES).to(tl.uint8, bitcast=True)


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
        even = tl.load(
            pointers, mask=inside & (row + i < M)[:, None], other=0.0, eviction_policy=KEEP
        )
        odd = tl.load(
            pointers + N, mask=inside & (row + i + 1 < M)[:, None], other=0.0, eviction_policy=KEEP
        )
    return even.to(tl.float32), odd.to(tl.float32)


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
    out_ptr, even, odd, row, col, M, N, ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr
):
    """Codes of a tile's halves to the columnwise operand, (N, M); as 16-bit words where ``out_ptr`` points to those.

    It does where M is even, so that every word lies within one row.
    """
    i, j = tl.arange(0, ROWS // 2), tl.arange(0, COLS)
    words = tl.trans(even.to(tl.uint16) | (odd.to(tl.uint16) << 8))
    if out_ptr.dtype.element_ty == tl.uint16:
        pointers = out_ptr + col.to(tl.int64) * (M // 2) + row // 2 + j[:, None] * (M // 2) + i[None, :]
        if WHOLE:
            tl.store(pointers, words)
        else:
            tl.store(pointers, words, mask=(col + j < N)[:, None] & (row + 2 * i < M)[None, :])
    else:
        pointers = out_ptr + col.to(tl.int64) * M + row + j[:, None] * M + 2 * i[None, :]
        inside = (col + j < N)[:, None]
        tl.store(pointers, (words & 0xFF).to(tl.uint8), mask=inside & (row + 2 * i < M)[None, :])
        tl.store(pointers + 1, (words >> 8).to(tl.uint8), mask=inside & (row + 2 * i + 1 < M)[None, :])
