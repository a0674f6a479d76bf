"""Tiles of bfloat16 as pairs: int32 words of two neighbours in a row, the left one in the low half.

A tile of pairs takes half the registers of one of float32, and an instruction compares both of a pair. Amaxes are those
of finite elements; ``finite_or_nan_pair`` does for a pair what ``finite_or_nan`` does for an element.
"""

import triton
import triton.language as tl

from f8sub.kernels.triton.ptx import unless_interpreted
from f8sub.kernels.triton.tiles import NAN, codes, finite_or_nan

CAST_TO_E4M3 = tl.constexpr("cvt.rn.satfinite.e4m3x2.f32")
CAST_TO_E5M2 = tl.constexpr("cvt.rn.satfinite.e5m2x2.f32")


@triton.jit
def left(pair):
    """Float32 elements."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def right(pair):
    """Float32 elements."""
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _bits(x):
    return x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _plain_rounded_pair(first, second):
    return _bits(first) | (_bits(second) << 16)


@triton.jit
def _plain_finite_or_nan_pair(pair):
    return _plain_rounded_pair(finite_or_nan(left(pair)), finite_or_nan(right(pair)))


@unless_interpreted(_plain_finite_or_nan_pair)
@triton.jit
def finite_or_nan_pair(pair):
    """NaN for infinity, everything else unchanged, -0 too."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.bf16x2 $0, $1, zero, $1; }",
        "=r,r",
        [pair],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def order(pair):
    """Signed halves in the order of the magnitudes of finite elements; all others come before these."""
    return (pair & 0x7FFF7FFF) + 0x00800080


@triton.jit
def low(halves):
    """The signed low half."""
    return (halves << 16) >> 16


@triton.jit
def high(halves):
    """The signed high half."""
    return halves >> 16


@triton.jit
def _plain_later(a, b):
    return (tl.maximum(low(a), low(b)) & 0xFFFF) | (tl.maximum(high(a), high(b)) << 16)


@unless_interpreted(_plain_later)
@triton.jit
def later(a, b):
    """Of two ``order``s, or of what this makes of them, the later half of each side."""
    return tl.inline_asm_elementwise(
        "max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _plain_last(orders, AXIS: tl.constexpr):
    return (tl.max(low(orders), AXIS) & 0xFFFF) | (tl.max(high(orders), AXIS) << 16)


@unless_interpreted(_plain_last)
@triton.jit
def last(orders, AXIS: tl.constexpr):
    """``later`` of all along an axis."""
    return tl.reduce(orders, AXIS, later)


@triton.jit
def _plain_later_of_each(a, b):
    return (tl.maximum(low(a), high(a)) & 0xFFFF) | (tl.maximum(low(b), high(b)) << 16)


@unless_interpreted(_plain_later_of_each)
@triton.jit
def later_of_each(a, b):
    """Of two ``order``s: the later half of ``a`` to the left, that of ``b`` to the right."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 l, r; prmt.b32 l, $1, $2, 0x5410; prmt.b32 r, $1, $2, 0x7632; max.s16x2 $0, l, r; }",
        "=r,r,r",
        [a, b],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def amax_at(half):
    """The amax that stands at a half of an ``order``, float32; 0 where no element is finite."""
    return (tl.maximum(half - 0x80, 0) << 16).to(tl.float32, bitcast=True)


@triton.jit
def order_of_tile(even, odd):
    """The last half in the ``order`` of a tile's even and odd rows."""
    both = later(order(even), order(odd))
    halves = last(tl.reshape(both, (both.shape[0] * both.shape[1],)), 0)
    return tl.maximum(low(halves), high(halves))


@triton.jit
def largest_bits(even, odd):
    """Bits of the largest magnitude of a tile's even and odd rows as a bfloat16; those of NaN come last."""
    # Of magnitudes alone no half is negative.
    both = later(even & 0x7FFF7FFF, odd & 0x7FFF7FFF)
    halves = last(tl.reshape(both, (both.shape[0] * both.shape[1],)), 0)
    return tl.maximum(low(halves), high(halves))


@triton.jit
def _two_codes(first, second, TOP: tl.constexpr):
    CODES: tl.constexpr = tl.float8e4nv if TOP == 448.0 else tl.float8e5
    low = codes(tl.clamp(first, -TOP, TOP, propagate_nan=NAN), CODES).to(tl.int32)
    return low | (codes(tl.clamp(second, -TOP, TOP, propagate_nan=NAN), CODES).to(tl.int32) << 8)


@triton.jit
def _plain_codes_of_rows(pair, scale, TOP: tl.constexpr):
    return _two_codes(left(pair) * scale, right(pair) * scale, TOP).to(tl.uint16)


@unless_interpreted(_plain_codes_of_rows)
@triton.jit
def codes_of_rows(pair, scale, TOP: tl.constexpr):
    """``reference.cast`` of each ``finite_or_nan_pair``, scaled, as a 16-bit word."""
    CAST: tl.constexpr = CAST_TO_E4M3 if TOP == 448.0 else CAST_TO_E5M2
    return tl.inline_asm_elementwise(
        "{ .reg .f32 a, b, c, d; .reg .b16 u, v;"
        "shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000; shl.b32 c, $2, 16; and.b32 d, $2, 0xffff0000;"
        "mul.f32 a, a, $3; mul.f32 b, b, $3; mul.f32 c, c, $4; mul.f32 d, d, $4;"
        + CAST
        + " u, b, a;"
        + CAST
        + " v, d, c; mov.b32 $0, {u, v}; }",
        "=r,r,r,r,r",
        [pair, scale],
        dtype=tl.uint16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _plain_codes_of_columns(even, odd, left_scale, right_scale, TOP: tl.constexpr):
    low = _two_codes(left(even) * left_scale, left(odd) * left_scale, TOP)
    return low | (_two_codes(right(even) * right_scale, right(odd) * right_scale, TOP) << 16)


@unless_interpreted(_plain_codes_of_columns)
@triton.jit
def codes_of_columns(even, odd, left_scale, right_scale, TOP: tl.constexpr):
    """``reference.cast`` of two rows of ``finite_or_nan_pair``s, scaled, as 32-bit words: left codes, right ones."""
    CAST: tl.constexpr = CAST_TO_E4M3 if TOP == 448.0 else CAST_TO_E5M2
    return tl.inline_asm_elementwise(
        "{ .reg .f32 a, b, c, d; .reg .b16 u, v;"
        "shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000; shl.b32 c, $2, 16; and.b32 d, $2, 0xffff0000;"
        "mul.f32 a, a, $3; mul.f32 b, b, $4; mul.f32 c, c, $3; mul.f32 d, d, $4;"
        + CAST
        + " u, c, a;"
        + CAST
        + " v, d, b; mov.b32 $0, {u, v}; }",
        "=r,r,r,r,r",
        [even, odd, left_scale, right_scale],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _plain_rows_of_columns(words):
    even = (words & 0xFF) | ((words >> 8) & 0xFF00)
    odd = ((words >> 8) & 0xFF) | ((words >> 16) & 0xFF00)
    return even.to(tl.uint16), odd.to(tl.uint16)


@unless_interpreted(_plain_rows_of_columns)
@triton.jit
def rows_of_columns(words):
    """``codes_of_rows`` of the even and of the odd row, of ``codes_of_columns`` with the same scale for all."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;",
        "=r,=r,r,r",
        [words],
        dtype=(tl.uint16, tl.uint16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def load_pairs(x_ptr, row, col, N, ROWS: tl.constexpr, COLS: tl.constexpr, KEEP: tl.constexpr):
    """Even and odd rows of the (ROWS, COLS) tile at (row, col); KEEP is how caches are to treat what was read.

    The matrix is bfloat16, begins at a whole word, and the tile lies within it.
    """
    i, j = 2 * tl.arange(0, ROWS // 2), tl.arange(0, COLS // 2)
    start = x_ptr.to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * (N // 2) + col // 2
    pointers = start + i[:, None] * (N // 2) + j[None, :]
    even = tl.load(pointers, eviction_policy=KEEP)
    return even, tl.load(pointers + N // 2, eviction_policy=KEEP)


@triton.jit
def store_rows_of_pairs(
    row_ptr, even, odd, row, col, N, ROWS: tl.constexpr, COLS: tl.constexpr, BY_8: tl.constexpr
):
    """``codes_of_rows`` of a tile to the rowwise operand, (M, N); BY_8 of a thread's at a time, else 16."""
    i, j = 2 * tl.arange(0, ROWS // 2), tl.arange(0, COLS // 2)
    if BY_8:
        # The same numbers, of which Triton sees no more than four side by side: the 8 elements of one load.
        j = j // 4 * 4 + j % 4
    start = row_ptr.to(tl.pointer_type(tl.uint16)) + row.to(tl.int64) * (N // 2) + col // 2
    pointers = start + i[:, None] * (N // 2) + j[None, :]
    tl.store(pointers, even)
    tl.store(pointers + N // 2, odd)


@triton.jit
def store_columns_of_pairs(col_ptr, words, row, col, M, ROWS: tl.constexpr, COLS: tl.constexpr):
    """``codes_of_columns`` of a tile to the columnwise operand, (N, M), whose pointer is one to 16-bit words."""
    split = tl.join(words.to(tl.uint16), (words >> 16).to(tl.uint16))
    transposed = tl.trans(tl.reshape(split, (ROWS // 2, COLS)))
    i, j = tl.arange(0, ROWS // 2), tl.arange(0, COLS)
    start = col_ptr + col.to(tl.int64) * (M // 2) + row // 2
    tl.store(start + j[:, None] * (M // 2) + i[None, :], transposed)
