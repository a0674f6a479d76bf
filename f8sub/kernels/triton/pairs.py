"""Layer 1. Tiles of bfloat16 as pairs: int32 words of two neighbours in a row, the left one in the low half.

A tile of pairs takes half the registers of one of float32, and an instruction compares both of a pair. Elements are not
made finite: what a kernel of pairs has found an amax beyond LARGEST_BITS of, it does again as tiles.py has it.
"""

import struct

import triton
import triton.language as tl

from f8sub.kernels import reference
from f8sub.kernels.triton.ptx import unless_interpreted
from f8sub.kernels.triton.tiles import NAN, codes

LARGEST_BITS = tl.constexpr(int.from_bytes(struct.pack(">f", reference.LARGEST)[:2]))
"""``reference.LARGEST`` as a bfloat16: beyond it is what needs a clamp before it is scaled, infinity and NaN."""

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
def magnitudes(pair):
    """As a pair; their bits order as they do."""
    return pair & 0x7FFF7FFF


@triton.jit
def _plain_larger(a, b):
    return tl.maximum(a & 0xFFFF, b & 0xFFFF) | (tl.maximum(a >> 16, b >> 16) << 16)


@unless_interpreted(_plain_larger)
@triton.jit
def larger(a, b):
    """Of pairs of magnitudes: the larger left and the larger right one."""
    return tl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _plain_largest(pairs, AXIS: tl.constexpr):
    return tl.max(pairs & 0xFFFF, AXIS) | (tl.max(pairs >> 16, AXIS) << 16)


@unless_interpreted(_plain_largest)
@triton.jit
def largest(pairs, AXIS: tl.constexpr):
    """``larger`` of all along an axis."""
    return tl.reduce(pairs, AXIS, larger)


@triton.jit
def _plain_larger_of_each(a, b):
    return tl.maximum(a & 0xFFFF, a >> 16) | (tl.maximum(b & 0xFFFF, b >> 16) << 16)


@unless_interpreted(_plain_larger_of_each)
@triton.jit
def larger_of_each(a, b):
    """Of pairs of magnitudes, as a pair: the larger one of ``a``'s and the larger one of ``b``'s."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 l, r; prmt.b32 l, $1, $2, 0x5410; prmt.b32 r, $1, $2, 0x7632; max.u16x2 $0, l, r; }",
        "=r,r,r",
        [a, b],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def amax_of_tile(even, odd):
    """Bits of a bfloat16, of a tile's even and odd rows."""
    both = larger(magnitudes(even), magnitudes(odd))
    pair = largest(tl.reshape(both, (both.shape[0] * both.shape[1],)), 0)
    return tl.maximum(pair & 0xFFFF, pair >> 16)


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
    """``reference.cast`` of each pair, scaled, as a 16-bit word."""
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
    """``reference.cast`` of pairs of two rows, scaled, as 32-bit words: left column's codes, right column's."""
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
