"""Kernels for bfloat16 matrices of whole tiles, which they read as pairs.

A pair is an int32 word of two neighbours in a row, the left one in the low half. A tile of pairs takes half the
registers of one of float32, and one instruction compares both elements of a pair. A tile is two halves, its even and
its odd rows. Each kernel is bitwise the one of ``casts`` that it names, and reads its matrix once, except for half of
a 256x256 square.
"""

import triton
import triton.language as tl

from f8sub.kernels.triton.tiles import (
    INTERPRETED,
    NAN,
    At,
    codes,
    finite_or_nan,
    inverse,
    load,
    moved,
    place,
    scale_from_amax,
    scale_from_prior,
    store,
    store_scales_of_group_square,
    store_scales_of_square,
    store_zero_columns,
)

CAST_TO_E4M3 = tl.constexpr("cvt.rn.satfinite.e4m3x2.f32")
CAST_TO_E5M2 = tl.constexpr("cvt.rn.satfinite.e5m2x2.f32")


@triton.jit
def _left(pair):
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def _right(pair):
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _bits(x):
    return x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _finite_or_nan(pair):
    # As ``tiles.finite_or_nan`` for each element.
    if INTERPRETED:
        return _bits(finite_or_nan(_left(pair))) | (_bits(finite_or_nan(_right(pair))) << 16)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.bf16x2 $0, $1, zero, $1; }",
            "=r,r",
            [pair],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _order(pair):
    # Signed halves that order as the magnitudes of finite elements do; all others come before these.
    return (pair & 0x7FFF7FFF) + 0x00800080


@triton.jit
def _low(halves):
    return (halves << 16) >> 16


@triton.jit
def _high(halves):
    return halves >> 16


@triton.jit
def _later(a, b):
    # The later half on each side.
    if INTERPRETED:
        return (tl.maximum(_low(a), _low(b)) & 0xFFFF) | (tl.maximum(_high(a), _high(b)) << 16)
    else:
        return tl.inline_asm_elementwise(
            "max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _last(orders, AXIS: tl.constexpr):
    # ``_later`` of all along an axis.
    if INTERPRETED:
        return (tl.max(_low(orders), AXIS) & 0xFFFF) | (tl.max(_high(orders), AXIS) << 16)
    else:
        return tl.reduce(orders, AXIS, _later)


@triton.jit
def _later_of_each(a, b):
    # The later half of ``a`` on the left, that of ``b`` on the right.
    if INTERPRETED:
        return (tl.maximum(_low(a), _high(a)) & 0xFFFF) | (tl.maximum(_low(b), _high(b)) << 16)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 l, r; prmt.b32 l, $1, $2, 0x5410; prmt.b32 r, $1, $2, 0x7632; max.s16x2 $0, l, r; }",
            "=r,r,r",
            [a, b],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _last_of_tile(even, odd):
    both = _later(even, odd)
    halves = _last(tl.reshape(both, (both.shape[0] * both.shape[1],)), 0)
    return tl.maximum(_low(halves), _high(halves))


@triton.jit
def _scale_at(half, CAST: tl.constexpr):
    # ``half`` is one of an ``_order``; the amax that stands there is 0 where no element is finite.
    return scale_from_amax((tl.maximum(half - 0x80, 0) << 16).to(tl.float32, bitcast=True), CAST)


@triton.jit
def _two_codes(first, second, CAST: tl.constexpr):
    low = codes(tl.clamp(first, -CAST.TOP, CAST.TOP, propagate_nan=NAN), CAST.CODES).to(tl.int32)
    high = codes(tl.clamp(second, -CAST.TOP, CAST.TOP, propagate_nan=NAN), CAST.CODES).to(tl.int32)
    return low | (high << 8)


@triton.jit
def _codes_of_rows(pair, scale, CAST: tl.constexpr):
    # ``reference.cast`` of each ``_finite_or_nan`` pair, as a 16-bit word.
    if INTERPRETED:
        return _two_codes(_left(pair) * scale, _right(pair) * scale, CAST).to(tl.uint16)
    else:
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
            pack=2,
        )


@triton.jit
def _codes_of_columns(even, odd, left_scale, right_scale, CAST: tl.constexpr):
    # ``reference.cast`` of two rows of ``_finite_or_nan`` pairs, as 32-bit words: left codes, right codes.
    if INTERPRETED:
        low = _two_codes(_left(even) * left_scale, _left(odd) * left_scale, CAST)
        return low | (_two_codes(_right(even) * right_scale, _right(odd) * right_scale, CAST) << 16)
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
def _rows_of_columns(words):
    # ``_codes_of_rows`` of the even and of the odd row, of ``_codes_of_columns`` with the same scale for all.
    if INTERPRETED:
        even = (words & 0xFF) | ((words >> 8) & 0xFF00)
        odd = ((words >> 8) & 0xFF) | ((words >> 16) & 0xFF00)
        return even.to(tl.uint16), odd.to(tl.uint16)
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;",
            "=r,=r,r,r",
            [words],
            dtype=(tl.uint16, tl.uint16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def _source(strips_ptr, STRIPS, at, EDGE: tl.constexpr):
    # The row of x that a tile's first one is, and where its group ends there; see ``strips``.
    if strips_ptr is None:
        return at.row, at.M
    else:
        strip = at.row // EDGE
        return tl.load(strips_ptr + strip), tl.load(strips_ptr + STRIPS + strip)


@triton.jit
def _load(x_ptr, stop, at, WHOLE: tl.constexpr, TILE: tl.constexpr, KEEP: tl.constexpr):
    # The matrix begins at a whole word; KEEP tells the caches what to do with what was read. Unless WHOLE, rows from
    # ``stop`` on are zeros.
    i, j = 2 * tl.arange(0, TILE.ROWS // 2), tl.arange(0, TILE.COLS // 2)
    start = x_ptr.to(tl.pointer_type(tl.int32)) + at.row.to(tl.int64) * (at.N // 2) + at.col // 2
    pointers = start + i[:, None] * (at.N // 2) + j[None, :]
    even = load(pointers, (at.row + i < stop)[:, None], WHOLE, KEEP)
    return even, load(pointers + at.N // 2, (at.row + i + 1 < stop)[:, None], WHOLE, KEEP)


@triton.jit
def _store_rows(row_ptr, even, odd, stop, at, BY_8: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr):
    # A thread stores 8 codes at a time where BY_8, else 16. Unless WHOLE, no rows from ``stop`` on.
    i, j = 2 * tl.arange(0, TILE.ROWS // 2), tl.arange(0, TILE.COLS // 2)
    if BY_8:
        # The same numbers, of which Triton sees no more than four side by side: the 8 elements of one load.
        j = j // 4 * 4 + j % 4
    start = row_ptr.to(tl.pointer_type(tl.uint16)) + at.row.to(tl.int64) * (at.N // 2) + at.col // 2
    pointers = start + i[:, None] * (at.N // 2) + j[None, :]
    store(pointers, even, (at.row + i < stop)[:, None], WHOLE)
    store(pointers + at.N // 2, odd, (at.row + i + 1 < stop)[:, None], WHOLE)


@triton.jit
def _store_columns(col_ptr, words, at, TILE: tl.constexpr):
    # ``col_ptr`` points to 16-bit words.
    split = tl.join(words.to(tl.uint16), (words >> 16).to(tl.uint16))
    HALF: tl.constexpr = TILE.ROWS // 2
    COLS: tl.constexpr = TILE.COLS
    transposed = tl.trans(tl.reshape(split, (HALF, COLS)))
    i, j = tl.arange(0, HALF), tl.arange(0, COLS)
    start = col_ptr + at.col.to(tl.int64) * (at.M // 2) + at.row // 2
    tl.store(start + j[:, None] * (at.M // 2) + i[None, :], transposed)


@triton.jit
def _store_with_one(row_ptr, col_ptr, even, odd, scale, at, CAST: tl.constexpr, TILE: tl.constexpr):
    words = _codes_of_columns(_finite_or_nan(even), _finite_or_nan(odd), scale, scale, CAST)
    if row_ptr is not None:
        even_codes, odd_codes = _rows_of_columns(words)
        _store_rows(row_ptr, even_codes, odd_codes, at.M, at, False, True, TILE)
    _store_columns(col_ptr, words, at, TILE)


@triton.jit
def _store_inverses(
    scale_inv_ptr, first, second, count, WHOLE: tl.constexpr, POWER_OF_2: tl.constexpr, EDGE: tl.constexpr
):
    # ``first`` are the scales of every second line; unless WHOLE, ``count`` of all are stored.
    scale_inv = tl.reshape(tl.join(inverse(first, POWER_OF_2), inverse(second, POWER_OF_2)), (EDGE,))
    line = tl.arange(0, EDGE)
    store(scale_inv_ptr + line, scale_inv, line < count, WHOLE)


@triton.jit
def _store_past(col_ptr, col_scale_inv_ptr, at, EDGE: tl.constexpr, TILE: tl.constexpr):
    # Rows after the last group: zeros, and scales of 1.
    store_zero_columns(col_ptr, at, TILE)
    scales = col_scale_inv_ptr + (at.row // EDGE).to(tl.int64) * at.N + at.col
    tl.store(scales + tl.arange(0, EDGE), tl.full((EDGE,), 1.0, tl.float32))


@triton.jit(do_not_specialize=["LINES"])
def quantize_paired_vectors(
    x_ptr, strips_ptr, row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr, STRIPS, LINES, M, N,
    CAST: tl.constexpr, EDGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``casts.quantize_crossing_vectors``; with a table of strips ``grouped_casts.quantize_group_vectors``."""
    at = place(tl.program_id(0), M, N, EDGE, EDGE)
    WHOLE: tl.constexpr = strips_ptr is None
    line, stop = _source(strips_ptr, STRIPS, at, EDGE)
    if not WHOLE:
        if line >= stop:
            _store_past(col_ptr, col_scale_inv_ptr, at, EDGE, TILE)
            return
    source = At(line, at.col, M, N)
    even, odd = _load(x_ptr, stop, source, WHOLE, TILE, "evict_first")
    even_order, odd_order = _order(even), _order(odd)
    of_columns = _last(_later(even_order, odd_order), 0)
    of_rows = _last(_later_of_each(even_order, odd_order), 1) if row_ptr is not None else 0
    even, odd = _finite_or_nan(even), _finite_or_nan(odd)
    if row_ptr is not None:
        even_scale, odd_scale = _scale_at(_low(of_rows), CAST), _scale_at(_high(of_rows), CAST)
        even_codes = _codes_of_rows(even, even_scale[:, None], CAST)
        odd_codes = _codes_of_rows(odd, odd_scale[:, None], CAST)
        _store_rows(row_ptr, even_codes, odd_codes, stop, source, True, WHOLE, TILE)
        scales = row_scale_inv_ptr + (at.col // EDGE).to(tl.int64) * LINES + line
        _store_inverses(scales, even_scale, odd_scale, stop - line, WHOLE, CAST.POWER_OF_2, EDGE)
    left_scale, right_scale = _scale_at(_low(of_columns), CAST), _scale_at(_high(of_columns), CAST)
    words = _codes_of_columns(even, odd, left_scale[None, :], right_scale[None, :], CAST)
    _store_columns(col_ptr, words, at, TILE)
    scales = col_scale_inv_ptr + (at.row // EDGE).to(tl.int64) * N + at.col
    _store_inverses(scales, left_scale, right_scale, EDGE, True, CAST.POWER_OF_2, EDGE)


@triton.jit
def quantize_paired_squares(
    x_ptr, strips_ptr, row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr, STRIPS, M, N,
    CAST: tl.constexpr, EDGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``casts.quantize_squares`` of the columnwise usage, and of the rowwise one unless its pointer is None.

    Or ``grouped_casts.quantize_group_squares`` if there is a table of strips.

    The last COLS columns of a square stay in registers, those before them are read once more to be cast: if a program
    held a large square whole, an SM would have one program, and nothing to do while that one loads.
    """
    square = place(tl.program_id(0), M, N, EDGE, EDGE)
    WHOLE: tl.constexpr = strips_ptr is None
    line, stop = _source(strips_ptr, STRIPS, square, EDGE)
    source = At(line, square.col, M, N)
    half = 0
    for start in range(0, EDGE - TILE.COLS, TILE.COLS):
        even, odd = _load(x_ptr, stop, moved(source, 0, start), WHOLE, TILE, "evict_last")
        half = tl.maximum(half, _last_of_tile(_order(even), _order(odd)))
    end = moved(square, 0, EDGE - TILE.COLS)
    even, odd = _load(x_ptr, stop, moved(source, 0, EDGE - TILE.COLS), WHOLE, TILE, "evict_first")
    half = tl.maximum(half, _last_of_tile(_order(even), _order(odd)))
    scale = _scale_at(half, CAST)
    _store_with_one(row_ptr, col_ptr, even, odd, scale, end, CAST, TILE)
    for start in range(0, EDGE - TILE.COLS, TILE.COLS):
        even, odd = _load(x_ptr, stop, moved(source, 0, start), WHOLE, TILE, "evict_first")
        _store_with_one(row_ptr, col_ptr, even, odd, scale, moved(square, 0, start), CAST, TILE)
    scale_inv = inverse(scale, CAST.POWER_OF_2)
    if strips_ptr is None:
        store_scales_of_square(
            row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr, scale_inv, square, EDGE
        )
    else:
        store_scales_of_group_square(
            row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr, scale_inv, square, EDGE
        )


@triton.jit
def cast_pairs_with_prior(
    x_ptr, amax_ptr, prior_ptr, largest_ptr, row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr, M, N,
    CAST: tl.constexpr, HEADROOM: tl.constexpr, COVERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``casts.cast_with_one`` with a prior scale, for columns, and for rows unless their pointer is None."""
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    at = place(index, M, N, TILE.ROWS, TILE.COLS)
    scale = tl.load(prior_ptr)
    if amax_ptr is not None:
        scale = scale_from_prior(scale, tl.load(amax_ptr), CAST, HEADROOM, COVERS)
    even, odd = _load(x_ptr, at.M, at, True, TILE, "evict_first")
    # Magnitudes have no sign, so that no half is negative; the bits of NaN come last.
    largest = _last_of_tile(even & 0x7FFF7FFF, odd & 0x7FFF7FFF)
    tl.atomic_max(largest_ptr, largest << 16, sem="relaxed")
    _store_with_one(row_ptr, col_ptr, even, odd, scale, at, CAST, TILE)
    scale_inv = inverse(scale, False)
    if row_ptr is not None:
        tl.store(row_scale_inv_ptr, scale_inv, mask=index == 0)
    tl.store(col_scale_inv_ptr, scale_inv, mask=index == 0)
