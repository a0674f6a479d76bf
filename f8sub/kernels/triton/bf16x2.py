"""Tiles of bfloat16 elements as pairs.

[Note] Pairs. A pair is an int32 word of two neighbours in a row, the left one in the low half. A tile of pairs takes
half the registers of one of float32, and one instruction compares both elements of a pair. A tile is two halves, its
even and its odd rows, and has no column beyond the matrix.
"""

import triton
import triton.language as tl

from f8sub.kernels.triton.tile_ops import (
    INTERPRETED,
    NAN,
    codes,
    factor_of,
    finite_or_nan,
    inverse,
    load,
    row_taken,
    scale_from_amax,
    store,
)

# They saturate and keep NaN, as ``reference.cast`` does, and cast two numbers at once.
CAST_TO_E4M3 = tl.constexpr("cvt.rn.satfinite.e4m3x2.f32")
CAST_TO_E5M2 = tl.constexpr("cvt.rn.satfinite.e5m2x2.f32")


@triton.jit
def _lo(pair):
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def _hi(pair):
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _bits(x):
    return x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def finite_pair(pair):
    """Return ``tile_ops.finite_or_nan`` of each element of a pair."""
    if INTERPRETED:
        return _bits(finite_or_nan(_lo(pair))) | (_bits(finite_or_nan(_hi(pair))) << 16)
    else:
        return tl.inline_asm_elementwise(
            # x * 0 + x, as ``finite_or_nan``
            "{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.bf16x2 $0, $1, zero, $1; }",
            "=r,r",
            [pair],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def order(pair):
    """Return signed halves that order as the magnitudes of finite elements do; all others come before these."""
    # Without signs, 0x7F80 and more are infinity and NaN: adding 0x80 makes those negative as int16.
    return (pair & 0x7FFF7FFF) + 0x00800080


@triton.jit
def low(halves):
    """Return the halves on the left, sign-extended."""
    return (halves << 16) >> 16


@triton.jit
def high(halves):
    """Return the halves on the right, sign-extended."""
    return halves >> 16


@triton.jit
def larger_of_each_half(a, b):
    """Return the larger half on each side."""
    if INTERPRETED:
        return (tl.maximum(low(a), low(b)) & 0xFFFF) | (tl.maximum(high(a), high(b)) << 16)
    else:
        return tl.inline_asm_elementwise(
            "max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def largest_halves(orders, AXIS: tl.constexpr):
    """Return ``later`` of all along an axis."""
    if INTERPRETED:
        return (tl.max(low(orders), AXIS) & 0xFFFF) | (tl.max(high(orders), AXIS) << 16)
    else:
        return tl.reduce(orders, AXIS, larger_of_each_half)


@triton.jit
def larger_within_pairs(a, b):
    """Return the larger half of ``a`` on the left, that of ``b`` on the right."""
    if INTERPRETED:
        return (tl.maximum(low(a), high(a)) & 0xFFFF) | (tl.maximum(low(b), high(b)) << 16)
    else:
        return tl.inline_asm_elementwise(
            # l: the left halves of both, r: the right ones
            "{ .reg .b32 l, r; prmt.b32 l, $1, $2, 0x5410; prmt.b32 r, $1, $2, 0x7632; max.s16x2 $0, l, r; }",
            "=r,r,r",
            [a, b],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def largest_half_of_tile(even, odd):
    """Return the largest half of all, on either side."""
    both = larger_of_each_half(even, odd)
    halves = largest_halves(tl.reshape(both, (both.shape[0] * both.shape[1],)), 0)
    return tl.maximum(low(halves), high(halves))


@triton.jit
def amax_bits_at(half):
    """Return ``tile_ops.amax_bits`` of half an ``order``; 0 where no element is finite."""
    # bfloat16 is the upper half of float32.
    return tl.maximum(half - 0x80, 0) << 16


@triton.jit
def scale_at(half, CAST: tl.constexpr):
    """Return the scale, float32, of the amax that stands at half an ``order``."""
    return scale_from_amax(amax_bits_at(half).to(tl.float32, bitcast=True), CAST)


@triton.jit
def _two_codes(first, second, CAST: tl.constexpr):
    low = codes(tl.clamp(first, -CAST.TOP, CAST.TOP, propagate_nan=NAN), CAST.CODES).to(tl.int32)
    high = codes(tl.clamp(second, -CAST.TOP, CAST.TOP, propagate_nan=NAN), CAST.CODES).to(tl.int32)
    return low | (high << 8)


@triton.jit
def codes_of_rows(pair, scale, CAST: tl.constexpr):
    """Return ``reference.cast`` of each ``finite_pair``, as a 16-bit word; ``scale`` is that of the row."""
    if INTERPRETED:
        return _two_codes(_lo(pair) * scale, _hi(pair) * scale, CAST).to(tl.uint16)
    else:
        # bfloat16 is the upper half of float32: a shift or a mask makes the one of the other.
        TO: tl.constexpr = CAST_TO_E4M3 if CAST.TOP == 448.0 else CAST_TO_E5M2
        return tl.inline_asm_elementwise(
            "{ .reg .f32 a, b, c, d; .reg .b16 u, v;"
            "shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000; shl.b32 c, $2, 16; and.b32 d, $2, 0xffff0000;"
            "mul.f32 a, a, $3; mul.f32 b, b, $3; mul.f32 c, c, $4; mul.f32 d, d, $4;"
            + TO
            + " u, b, a;"
            + TO
            + " v, d, c; mov.b32 $0, {u, v}; }",
            "=r,r,r,r,r",
            [pair, scale],
            dtype=tl.uint16,
            is_pure=True,
            # two pairs are one 32-bit register of data
            pack=2,
        )


@triton.jit
def codes_of_columns(even, odd, left_scale, right_scale, CAST: tl.constexpr):
    """Return ``reference.cast`` of two rows of ``finite_pair``, as 32-bit words: left columns, right columns."""
    if INTERPRETED:
        low = _two_codes(_lo(even) * left_scale, _lo(odd) * left_scale, CAST)
        return low | (_two_codes(_hi(even) * right_scale, _hi(odd) * right_scale, CAST) << 16)
    else:
        TO: tl.constexpr = CAST_TO_E4M3 if CAST.TOP == 448.0 else CAST_TO_E5M2
        return tl.inline_asm_elementwise(
            "{ .reg .f32 a, b, c, d; .reg .b16 u, v;"
            "shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000; shl.b32 c, $2, 16; and.b32 d, $2, 0xffff0000;"
            "mul.f32 a, a, $3; mul.f32 b, b, $4; mul.f32 c, c, $3; mul.f32 d, d, $4;"
            + TO
            + " u, c, a;"
            + TO
            + " v, d, b; mov.b32 $0, {u, v}; }",
            "=r,r,r,r,r",
            [even, odd, left_scale, right_scale],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def rows_of_columns(words):
    """Return the words of ``codes_of_rows`` for the even and the odd row, from ``codes_of_columns`` with one scale."""
    if INTERPRETED:
        even = (words & 0xFF) | ((words >> 8) & 0xFF00)
        odd = ((words >> 8) & 0xFF) | ((words >> 16) & 0xFF00)
        return even.to(tl.uint16), odd.to(tl.uint16)
    else:
        return tl.inline_asm_elementwise(
            # bytes 0 and 2 of a word are of the even row, bytes 1 and 3 of the odd one
            "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;",
            "=r,=r,r,r",
            [words],
            dtype=(tl.uint16, tl.uint16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def _load_pairs(x_ptr, STRIDE, stop, at, WHOLE: tl.constexpr, TILE: tl.constexpr, KEEP: tl.constexpr):
    i, j = 2 * tl.arange(0, TILE.ROWS // 2), tl.arange(0, TILE.COLS // 2)
    # int32 words [M, STRIDE / 2]
    start = x_ptr.to(tl.pointer_type(tl.int32)) + at.row.to(tl.int64) * (STRIDE // 2) + at.col // 2
    pointers = start + i[:, None] * (STRIDE // 2) + j[None, :]
    even = load(pointers, (at.row + i < stop)[:, None], WHOLE, KEEP)
    return even, load(pointers + STRIDE // 2, (at.row + i + 1 < stop)[:, None], WHOLE, KEEP)


@triton.jit
def load_pairs(x_ptr, stop, at, WHOLE: tl.constexpr, TILE: tl.constexpr, KEEP: tl.constexpr):
    """Load even and odd rows of a tile of a matrix that begins at a whole word: int32, each (ROWS / 2, COLS / 2).

    Unless WHOLE, rows from ``stop`` on are zeros. KEEP is for the caches.
    """
    return _load_pairs(x_ptr, at.N, stop, at, WHOLE, TILE, KEEP)


@triton.jit
def _times(pair, factor):
    # Each product is rounded to bfloat16, as PyTorch's is.
    if INTERPRETED:
        return _bits(_lo(pair) * factor) | (_bits(_hi(pair) * factor) << 16)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 a, b; shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000;"
            "mul.f32 a, a, $2; mul.f32 b, b, $2; cvt.rn.bf16x2.f32 $0, b, a; }",
            "=r,r,r",
            [pair, factor],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _load_taken(x_ptr, index_ptr, factor_ptr, line, is_line, at, TILE: tl.constexpr, KEEP: tl.constexpr):
    row, j = row_taken(index_ptr, line, is_line), tl.arange(0, TILE.COLS // 2)
    # int32 words [rows of x, N / 2]
    start = x_ptr.to(tl.pointer_type(tl.int32)) + at.col // 2
    pair = load(start + row[:, None] * (at.N // 2) + j[None, :], is_line[:, None], False, KEEP)
    if factor_ptr is not None:
        pair = _times(pair, factor_of(factor_ptr, line, is_line)[:, None])
    return pair


@triton.jit
def _rounded(x):
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _swiglu(gate, up):
    return _rounded(gate / (1.0 + tl.exp(-gate))) * up


@triton.jit
def _gradient_of_gate(dh, gate, up):
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    return _rounded(dh * up) * sigmoid * (1.0 + gate * (1.0 - sigmoid))


_MINUS_LOG2_E, _ONE = "0fBFB8AA3B", "0f3F800000"
# s and t: the sigmoids of g and h, the halves of a pair of gates.
_SIGMOIDS = (
    ".reg .f32 g, h, s, t; shl.b32 g, GATE, 16; and.b32 h, GATE, 0xffff0000;"
    f"mul.f32 s, g, {_MINUS_LOG2_E}; mul.f32 t, h, {_MINUS_LOG2_E};"
    "ex2.approx.ftz.f32 s, s; ex2.approx.ftz.f32 t, t;"
    f"add.f32 s, s, {_ONE}; add.f32 t, t, {_ONE}; rcp.approx.ftz.f32 s, s; rcp.approx.ftz.f32 t, t;"
)
# The activation of both, rounded, times another pair: the product of two bfloat16s is rounded once, as by float32.
_TIMES_ACTIVATION = (
    ".reg .f32 u, v; .reg .b32 a; mul.f32 u, g, s; mul.f32 v, h, t; cvt.rn.bf16x2.f32 a, v, u;"
    "mul.rn.bf16x2 OUT, a, OTHER;"
)
# PyTorch's silu_backward of dh * up, rounded before.
_GRADIENT_OF_GATE = (
    ".reg .f32 p, q; .reg .b32 d; mul.rn.bf16x2 d, DH, UP; shl.b32 p, d, 16; and.b32 q, d, 0xffff0000;"
    "mul.f32 p, p, s; mul.f32 q, q, t;"
    f"sub.f32 s, {_ONE}, s; sub.f32 t, {_ONE}, t; fma.rn.f32 s, g, s, {_ONE}; fma.rn.f32 t, h, t, {_ONE};"
    "mul.f32 p, p, s; mul.f32 q, q, t; cvt.rn.bf16x2.f32 OUT, q, p;"
)


def _instructions(*parts: str, **registers: str) -> tl.constexpr:
    text = "{ " + "".join(parts) + " }"
    for name, register in registers.items():
        text = text.replace(name, register)
    return tl.constexpr(text)


SWIGLU = _instructions(_SIGMOIDS, _TIMES_ACTIVATION, GATE="$1", OTHER="$2", OUT="$0")
OF_GATE = _instructions(_SIGMOIDS, _GRADIENT_OF_GATE, DH="$1", GATE="$2", UP="$3", OUT="$0")
OF_BOTH = _instructions(
    _SIGMOIDS,
    _TIMES_ACTIVATION.replace("OUT", "$1").replace("OTHER", "$2"),
    _GRADIENT_OF_GATE.replace("OUT", "$0"),
    DH="$2",
    GATE="$3",
    UP="$4",
)


@triton.jit
def _swiglu_pair(gate, up):
    if INTERPRETED:
        return _bits(_swiglu(_lo(gate), _lo(up))) | (_bits(_swiglu(_hi(gate), _hi(up))) << 16)
    else:
        return tl.inline_asm_elementwise(SWIGLU, "=r,r,r", [gate, up], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _gradient_of_gate_pair(dh, gate, up):
    if INTERPRETED:
        left = _gradient_of_gate(_lo(dh), _lo(gate), _lo(up))
        right = _gradient_of_gate(_hi(dh), _hi(gate), _hi(up))
        return _bits(left) | (_bits(right) << 16)
    else:
        return tl.inline_asm_elementwise(
            OF_GATE, "=r,r,r,r", [dh, gate, up], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _gradient_pairs(dh, gate, up):
    if INTERPRETED:
        return _gradient_of_gate_pair(dh, gate, up), _swiglu_pair(gate, dh)
    else:
        return tl.inline_asm_elementwise(
            OF_BOTH, "=&r,=&r,r,r,r", [dh, gate, up], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )


@triton.jit
def load_source(
    x_ptr, index_ptr, factor_ptr, gate_ptr, up_ptr, GATE_WIDTH, GATE_STRIDE, stop, at,
    SIDE: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Load a tile of what is cast as ``load_pairs``: of x, of ``operands.Taken``, or of ``Gated``, with x as its dh.

    Each operator's result is rounded, as PyTorch's are. The rows of gate and up have GATE_WIDTH columns and a stride of
    GATE_STRIDE.
    """
    if index_ptr is not None:
        line = at.row + 2 * tl.arange(0, TILE.ROWS // 2)
        even = _load_taken(x_ptr, index_ptr, factor_ptr, line, line < stop, at, TILE, KEEP)
        return even, _load_taken(x_ptr, index_ptr, factor_ptr, line + 1, line + 1 < stop, at, TILE, KEEP)
    elif gate_ptr is None:
        return load_pairs(x_ptr, stop, at, WHOLE, TILE, KEEP)
    else:
        even_gate, odd_gate = _load_pairs(gate_ptr, GATE_STRIDE, stop, at, WHOLE, TILE, KEEP)
        if x_ptr is None:
            even_up, odd_up = _load_pairs(up_ptr, GATE_STRIDE, stop, at, WHOLE, TILE, KEEP)
            return _swiglu_pair(even_gate, even_up), _swiglu_pair(odd_gate, odd_up)
        else:
            even_dh, odd_dh = _load_pairs(x_ptr, GATE_WIDTH, stop, at, WHOLE, TILE, KEEP)
            if SIDE == "gate":
                even_up, odd_up = _load_pairs(up_ptr, GATE_STRIDE, stop, at, WHOLE, TILE, KEEP)
                even = _gradient_of_gate_pair(even_dh, even_gate, even_up)
                return even, _gradient_of_gate_pair(odd_dh, odd_gate, odd_up)
            else:
                # The gradient of up is dh times the activation of gate.
                return _swiglu_pair(even_gate, even_dh), _swiglu_pair(odd_gate, odd_dh)


@triton.jit
def load_gradients(
    dh_ptr, gate_ptr, up_ptr, GATE_WIDTH, GATE_STRIDE, stop, at,
    WHOLE: tl.constexpr, TILE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Load a tile of the gradient of gate and the one of up at the same place, each as ``load_source``."""
    even_dh, odd_dh = _load_pairs(dh_ptr, GATE_WIDTH, stop, at, WHOLE, TILE, KEEP)
    even_gate, odd_gate = _load_pairs(gate_ptr, GATE_STRIDE, stop, at, WHOLE, TILE, KEEP)
    even_up, odd_up = _load_pairs(up_ptr, GATE_STRIDE, stop, at, WHOLE, TILE, KEEP)
    even, even_of_up = _gradient_pairs(even_dh, even_gate, even_up)
    odd, odd_of_up = _gradient_pairs(odd_dh, odd_gate, odd_up)
    return even, odd, even_of_up, odd_of_up


@triton.jit
def store_row_codes(
    row_ptr, even, odd, stop, at, BY_8: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr
):
    """Store the 16-bit words of both halves in rows; unless WHOLE, none of rows from ``stop`` on.

    A thread stores 8 bytes at a time where BY_8, else 16.
    """
    i, j = 2 * tl.arange(0, TILE.ROWS // 2), tl.arange(0, TILE.COLS // 2)
    if BY_8:
        # The same numbers, of which Triton sees no more than four side by side: the 8 elements of one load.
        j = j // 4 * 4 + j % 4
    # 16-bit words [M, N / 2] of a rowwise operand [M, N]
    start = row_ptr.to(tl.pointer_type(tl.uint16)) + at.row.to(tl.int64) * (at.N // 2) + at.col // 2
    pointers = start + i[:, None] * (at.N // 2) + j[None, :]
    store(pointers, even, (at.row + i < stop)[:, None], WHOLE)
    store(pointers + at.N // 2, odd, (at.row + i + 1 < stop)[:, None], WHOLE)


@triton.jit
def store_column_words(col_ptr, words, at, TILE: tl.constexpr):
    """Store the words of ``codes_of_columns`` in the columnwise operand, (N, M); ``col_ptr`` points to 16-bit words."""
    # A 32-bit word is two neighbouring columns: (ROWS / 2, COLS / 2, 2) is (ROWS / 2, COLS).
    split = tl.join(words.to(tl.uint16), (words >> 16).to(tl.uint16))
    HALF: tl.constexpr = TILE.ROWS // 2
    COLS: tl.constexpr = TILE.COLS
    transposed = tl.trans(tl.reshape(split, (HALF, COLS)))
    i, j = tl.arange(0, HALF), tl.arange(0, COLS)
    start = col_ptr + at.col.to(tl.int64) * (at.M // 2) + at.row // 2
    # 16-bit words [N, M / 2] of a columnwise operand [N, M]
    tl.store(start + j[:, None] * (at.M // 2) + i[None, :], transposed)


@triton.jit
def store_pairs_with_one(
    row_ptr, col_ptr, even, odd, scale, stop, source, at,
    CAST: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Cast a tile with one scale, and store rows at ``source`` unless their pointer is None, and columns at ``at``."""
    words = codes_of_columns(finite_pair(even), finite_pair(odd), scale, scale, CAST)
    if row_ptr is not None:
        even_codes, odd_codes = rows_of_columns(words)
        store_row_codes(row_ptr, even_codes, odd_codes, stop, source, False, WHOLE, TILE)
    store_column_words(col_ptr, words, at, TILE)


@triton.jit
def interleaved(first, second):
    """Interleave two tensors, which have every second one of some rows or columns each."""
    COUNT: tl.constexpr = 2 * first.shape[0]
    return tl.reshape(tl.join(first, second), (COUNT,))


@triton.jit
def store_inverses(scale_inv_ptr, first, second, count, WHOLE: tl.constexpr, POWER_OF_2: tl.constexpr):
    """Store the inverses of the scales of every second row or column; unless WHOLE, ``count`` of all."""
    scale_inv = interleaved(inverse(first, POWER_OF_2), inverse(second, POWER_OF_2))
    line = tl.arange(0, scale_inv.shape[0])
    store(scale_inv_ptr + line, scale_inv, line < count, WHOLE)
