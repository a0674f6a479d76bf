"""Casts with scales of whole groups by one launch: some groups' amaxes are found while others are cast.

[Note] Turns. An element is read for its group's amax, and again to be cast. Where groups are small, what was read for
amaxes a moment ago is still in L2 when it is cast. So one launch does both. Its programs have numbers in the order of
turns: those that read a strip of rows for amaxes, and, so many strips later that they mostly are done with its group,
those that cast one. For strips see ``quantize_grouped``; tokens are read as ``bf16x2``.
"""

import triton
import triton.language as tl

from f8sub.kernels.triton.bf16x2 import (
    amax_bits_at,
    codes_of_columns,
    codes_of_rows,
    finite_pair,
    high,
    interleaved,
    larger_of_each_half,
    larger_within_pairs,
    largest_half_of_tile,
    largest_halves,
    load_gradients,
    load_source,
    low,
    order,
    store_column_words,
    store_inverses,
    store_pairs_with_one,
    store_row_codes,
)
from f8sub.kernels.triton.quantize_grouped import load_turn
from f8sub.kernels.triton.tile_ops import (
    EXPONENT_BITS,
    At,
    codes,
    finite_or_nan,
    inverse,
    load,
    magnitude_bits,
    moved,
    scale_from_amax,
    scaled,
    store,
    store_zero_columns,
)


@triton.jit
def _mark_done(done_ptr):
    # The barrier has all threads' amaxes there before the number that tells of them.
    tl.debug_barrier()
    tl.atomic_add(done_ptr, 1, sem="release")


@triton.jit
def _wait(done_ptr, count):
    # No deadlock: GPUs start programs in the order of their numbers, which CUB's scans rely on, too, and those that
    # are waited for have smaller numbers and wait for nothing.
    while tl.atomic_add(done_ptr, 0, sem="acquire") < count:
        pass


@triton.jit
def _amax(pointers, mask):
    # Of bits that order as amaxes do. From L2, where atomics are.
    return tl.load(pointers, mask=mask, other=0, cache_modifier=".cg").to(tl.float32, bitcast=True)


@triton.jit
def _part(N, EDGE: tl.constexpr, TILE: tl.constexpr):
    # How many programs a strip has, and where in it the tile of this one begins.
    tiles = N // TILE.COLS
    part = tl.program_id(0) % (tiles * (EDGE // TILE.ROWS))
    return tiles * (EDGE // TILE.ROWS), part // tiles * TILE.ROWS, part % tiles * TILE.COLS


@triton.jit
def _is_empty(ends_ptr, group, LINES):
    stop = tl.minimum(tl.load(ends_ptr + group), LINES)
    return stop <= tl.minimum(tl.load(ends_ptr + group - 1, mask=group > 0, other=0), LINES)


@triton.jit
def _interleaved_bits(halves):
    return interleaved(amax_bits_at(low(halves)), amax_bits_at(high(halves)))


@triton.jit
def _take_amaxes_of_lines(row_amax_ptr, col_amax_ptr, even, odd, line, count, TILE: tl.constexpr):
    even, odd = order(even), order(odd)
    if row_amax_ptr is not None:
        i = tl.arange(0, TILE.ROWS)
        of_rows = _interleaved_bits(largest_halves(larger_within_pairs(even, odd), 1))
        tl.atomic_max(row_amax_ptr + line + i, of_rows, mask=i < count, sem="relaxed")
    of_columns = _interleaved_bits(largest_halves(larger_of_each_half(even, odd), 0))
    tl.atomic_max(col_amax_ptr + tl.arange(0, TILE.COLS), of_columns, sem="relaxed")


@triton.jit
def _cast_lines(
    row_amax_ptr, row_ptr, row_scale_inv_ptr, col_amax_ptr, col_ptr, col_scale_inv_ptr,
    even, odd, stop, source, at, is_first, CAST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    even, odd = finite_pair(even), finite_pair(odd)
    if row_ptr is not None:
        i = source.row + 2 * tl.arange(0, TILE.ROWS // 2)
        even_scale = scale_from_amax(_amax(row_amax_ptr + i, i < stop), CAST)
        odd_scale = scale_from_amax(_amax(row_amax_ptr + i + 1, i + 1 < stop), CAST)
        even_codes = codes_of_rows(even, even_scale[:, None], CAST)
        odd_codes = codes_of_rows(odd, odd_scale[:, None], CAST)
        store_row_codes(row_ptr, even_codes, odd_codes, stop, source, True, False, TILE)
        lines = tl.where(source.col == 0, stop - source.row, 0)
        store_inverses(row_scale_inv_ptr + source.row, even_scale, odd_scale, lines, False, CAST.POWER_OF_2)
    j = 2 * tl.arange(0, TILE.COLS // 2)
    left_scale = scale_from_amax(_amax(col_amax_ptr + j, True), CAST)
    right_scale = scale_from_amax(_amax(col_amax_ptr + j + 1, True), CAST)
    words = codes_of_columns(even, odd, left_scale[None, :], right_scale[None, :], CAST)
    store_column_words(col_ptr, words, at, TILE)
    lines = tl.where(is_first, TILE.COLS, 0)
    store_inverses(col_scale_inv_ptr, left_scale, right_scale, lines, False, CAST.POWER_OF_2)


@triton.jit
def _store_inverse(row_scale_inv_ptr, col_scale_inv_ptr, group, scale, mask, CAST: tl.constexpr):
    scale_inv = inverse(scale, CAST.POWER_OF_2)
    if row_scale_inv_ptr is not None:
        tl.store(row_scale_inv_ptr + group, scale_inv, mask=mask)
    tl.store(col_scale_inv_ptr + group, scale_inv, mask=mask)


@triton.jit(do_not_specialize=["TURNS", "LINES"])
def quantize_group_lines_one_pass(
    x_ptr, index_ptr, factor_ptr, gate_ptr, up_ptr, ends_ptr, turns_ptr, done_ptr, row_amax_ptr, row_ptr,
    row_scale_inv_ptr, col_amax_ptr, col_ptr, col_scale_inv_ptr, COUNT, TURNS, LINES, M, N, GATE_WIDTH, GATE_STRIDE,
    CAST: tl.constexpr, EDGE: tl.constexpr, SIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Run ``quantize_grouped.amax_of_group_lines`` and ``quantize.cast_with_lines`` in one launch, in turn.

    Where SIDE is "both" or "each", programs are of the tiles of gate, and have the one of up at the same place, too.
    Up's columns follow gate's in one matrix, or are of a matrix of their own below gate's.
    """
    EACH: tl.constexpr = SIDE == "each"
    BOTH: tl.constexpr = (SIDE == "both") or EACH
    parts, down, col = _part(GATE_WIDTH if BOTH else N, EDGE, TILE)
    strip, casts, line, stop, group, first, count = load_turn(turns_ptr, tl.program_id(0) // parts)
    line += down
    source, at = At(line, col, M, N), At(strip * EDGE + down, col, M, N)
    col_amaxes, col_scales = col_amax_ptr + group * N + col, col_scale_inv_ptr + group * N + col
    # From gate's amaxes and scales of columns to up's, and from its codes and lines.
    to_up = COUNT * N if EACH else GATE_WIDTH
    if casts:
        if group >= COUNT:
            store_zero_columns(col_ptr, at, TILE)
            if BOTH:
                store_zero_columns(col_ptr, moved(at, 0, GATE_WIDTH), TILE)
        else:
            is_first = (strip == first) & (down == 0)
            # Loaded before the wait: the loads are on their way meanwhile.
            if BOTH:
                even, odd, even_up, odd_up = load_gradients(
                    x_ptr, gate_ptr, up_ptr, GATE_WIDTH, GATE_STRIDE, stop, source, False, TILE, "evict_first"
                )
            else:
                even, odd = load_source(
                    x_ptr, index_ptr, factor_ptr, gate_ptr, up_ptr, GATE_WIDTH, GATE_STRIDE, stop, source,
                    SIDE, False, TILE, "evict_first",
                )  # fmt: skip
            _wait(done_ptr + group, count * parts)
            _cast_lines(
                row_amax_ptr, row_ptr, row_scale_inv_ptr, col_amaxes, col_ptr, col_scales,
                even, odd, stop, source, at, is_first, CAST, TILE,
            )  # fmt: skip
            if BOTH:
                if EACH:
                    source, stop = moved(source, LINES, 0), stop + LINES
                else:
                    source = moved(source, 0, GATE_WIDTH)
                _cast_lines(
                    row_amax_ptr, row_ptr, row_scale_inv_ptr, col_amaxes + to_up, col_ptr, col_scales + to_up,
                    even_up, odd_up, stop, source, moved(at, 0, GATE_WIDTH), is_first, CAST, TILE,
                )  # fmt: skip
    else:
        j = tl.arange(0, TILE.COLS)
        if group < COUNT:
            if BOTH:
                even, odd, even_up, odd_up = load_gradients(
                    x_ptr, gate_ptr, up_ptr, GATE_WIDTH, GATE_STRIDE, stop, source, False, TILE, "evict_last"
                )
                of_lines = line
                if EACH:
                    of_lines += LINES
                _take_amaxes_of_lines(
                    row_amax_ptr, col_amaxes + to_up, even_up, odd_up, of_lines, stop - line, TILE
                )
            else:
                even, odd = load_source(
                    x_ptr, index_ptr, factor_ptr, gate_ptr, up_ptr, GATE_WIDTH, GATE_STRIDE, stop, source,
                    SIDE, False, TILE, "evict_last",
                )  # fmt: skip
            _take_amaxes_of_lines(row_amax_ptr, col_amaxes, even, odd, line, stop - line, TILE)
            _mark_done(done_ptr + group)
        # Empty groups have no strips: their scales, which a GEMM reads, are 1.
        for one in range(strip, COUNT, TURNS):
            if (down == 0) & _is_empty(ends_ptr, one, LINES):
                ones = tl.full((TILE.COLS,), 1.0, tl.float32)
                tl.store(col_scale_inv_ptr + one * N + col + j, ones)
                if BOTH:
                    tl.store(col_scale_inv_ptr + one * N + col + to_up + j, ones)


@triton.jit(do_not_specialize=["TURNS", "LINES"])
def quantize_groups_one_pass(
    x_ptr, index_ptr, factor_ptr, gate_ptr, up_ptr, ends_ptr, turns_ptr, done_ptr, amax_ptr, row_ptr,
    row_scale_inv_ptr, col_ptr, col_scale_inv_ptr, COUNT, TURNS, LINES, M, N, GATE_WIDTH, GATE_STRIDE,
    CAST: tl.constexpr, EDGE: tl.constexpr, SIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Run ``quantize_grouped.amax_of_groups`` and ``cast_groups_with_one`` in one launch, in turn.

    For SIDE see ``quantize_group_lines_one_pass``.
    """
    EACH: tl.constexpr = SIDE == "each"
    BOTH: tl.constexpr = (SIDE == "both") or EACH
    parts, down, col = _part(GATE_WIDTH if BOTH else N, EDGE, TILE)
    strip, casts, line, stop, group, first, count = load_turn(turns_ptr, tl.program_id(0) // parts)
    line += down
    source, at = At(line, col, M, N), At(strip * EDGE + down, col, M, N)
    if casts:
        if group >= COUNT:
            store_zero_columns(col_ptr, at, TILE)
            if BOTH:
                store_zero_columns(col_ptr, moved(at, 0, GATE_WIDTH), TILE)
        else:
            if BOTH:
                even, odd, even_up, odd_up = load_gradients(
                    x_ptr, gate_ptr, up_ptr, GATE_WIDTH, GATE_STRIDE, stop, source, False, TILE, "evict_first"
                )
            else:
                even, odd = load_source(
                    x_ptr, index_ptr, factor_ptr, gate_ptr, up_ptr, GATE_WIDTH, GATE_STRIDE, stop, source,
                    SIDE, False, TILE, "evict_first",
                )  # fmt: skip
            _wait(done_ptr + group, count * parts)
            scale = scale_from_amax(_amax(amax_ptr + group, True), CAST)
            store_pairs_with_one(row_ptr, col_ptr, even, odd, scale, stop, source, at, CAST, False, TILE)
            is_first = (strip == first) & (down == 0) & (col == 0)
            _store_inverse(row_scale_inv_ptr, col_scale_inv_ptr, group, scale, is_first, CAST)
            if BOTH:
                at = moved(at, 0, GATE_WIDTH)
                if EACH:
                    scale = scale_from_amax(_amax(amax_ptr + COUNT + group, True), CAST)
                    _store_inverse(row_scale_inv_ptr, col_scale_inv_ptr, COUNT + group, scale, is_first, CAST)
                    source, stop = moved(source, LINES, 0), stop + LINES
                else:
                    source = moved(source, 0, GATE_WIDTH)
                store_pairs_with_one(
                    row_ptr, col_ptr, even_up, odd_up, scale, stop, source, at, CAST, False, TILE
                )
    else:
        if group < COUNT:
            if BOTH:
                even, odd, even_up, odd_up = load_gradients(
                    x_ptr, gate_ptr, up_ptr, GATE_WIDTH, GATE_STRIDE, stop, source, False, TILE, "evict_last"
                )
                even, odd, even_up, odd_up = order(even), order(odd), order(even_up), order(odd_up)
                if EACH:
                    bits = amax_bits_at(largest_half_of_tile(even_up, odd_up))
                    tl.atomic_max(amax_ptr + COUNT + group, bits, sem="relaxed")
                else:
                    even, odd = larger_of_each_half(even, even_up), larger_of_each_half(odd, odd_up)
            else:
                even, odd = load_source(
                    x_ptr, index_ptr, factor_ptr, gate_ptr, up_ptr, GATE_WIDTH, GATE_STRIDE, stop, source,
                    SIDE, False, TILE, "evict_last",
                )  # fmt: skip
                even, odd = order(even), order(odd)
            bits = amax_bits_at(largest_half_of_tile(even, odd))
            tl.atomic_max(amax_ptr + group, bits, sem="relaxed")
            _mark_done(done_ptr + group)
        for one in range(strip, COUNT, TURNS):
            is_empty = (down == 0) & (col == 0) & _is_empty(ends_ptr, one, LINES)
            unit = tl.full((), 1.0, tl.float32)
            _store_inverse(row_scale_inv_ptr, col_scale_inv_ptr, one, unit, is_empty, CAST)
            if EACH:
                _store_inverse(row_scale_inv_ptr, col_scale_inv_ptr, COUNT + one, unit, is_empty, CAST)


@triton.jit
def quantize_experts_one_pass(
    x_ptr, done_ptr, amax_ptr, row_ptr, row_scale_inv_ptr, EXPERTS, LOOKAHEAD, SIZE, STRIDE,
    CAST: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Run ``quantize.amax_of_matrix`` of experts and ``cast_experts`` in one launch.

    Expert e is cast while the amax of expert e + LOOKAHEAD is found: after the first ones, experts that are cast and
    experts that are read alternate; LOOKAHEAD < EXPERTS.
    """
    parts = tl.cdiv(SIZE, BLOCK)
    turn, start = tl.program_id(0) // parts - (LOOKAHEAD + 1), tl.program_id(0) % parts * BLOCK
    # Turns: LOOKAHEAD + 1 reads, then a cast and a read in turn while experts remain to be read, then casts.
    alternate = EXPERTS - (LOOKAHEAD + 1)
    is_cast = (turn >= 0) & ((turn >= 2 * alternate) | (turn % 2 == 0))
    expert = LOOKAHEAD + 1 + turn
    if is_cast:
        expert = tl.where(turn < 2 * alternate, turn // 2, turn - alternate)
    elif turn >= 0:
        expert = LOOKAHEAD + 1 + turn // 2
    offsets = tl.arange(0, BLOCK)
    inside = offsets < SIZE - start
    pointers = x_ptr + expert.to(tl.int64) * STRIDE + start + offsets
    if is_cast:
        x = load(pointers, inside, WHOLE, "evict_first").to(tl.float32)
        _wait(done_ptr + expert, parts)
        scale = scale_from_amax(_amax(amax_ptr + expert, True), CAST)
        made = codes(scaled(finite_or_nan(x), scale, CAST, False), CAST.CODES)
        store(row_ptr + expert.to(tl.int64) * SIZE + start + offsets, made, inside, WHOLE)
        tl.store(row_scale_inv_ptr + expert, inverse(scale, CAST.POWER_OF_2), mask=start == 0)
    else:
        bits = magnitude_bits(load(pointers, inside, WHOLE, "evict_last").to(tl.float32))
        tl.atomic_max(amax_ptr + expert, tl.max(tl.where(bits < EXPONENT_BITS, bits, 0)), sem="relaxed")
        _mark_done(done_ptr + expert)
