"""Casts with scales of whole groups, of which memory is read once: some groups' amaxes are found while others are cast.

[Note] Turns. An element is read for its group's amax, and again to be cast. Where groups are small, what was read for
amaxes a moment ago is still in L2 when it is cast. So one launch does both. Its programs have numbers in the order of
turns: those that read a strip of rows for amaxes, and, so many strips later that they mostly are done with its group,
those that cast one. ``done`` counts of each group the programs that found amaxes, and who casts waits for all of them.
GPUs start programs in the order of their numbers, which CUB's scans rely on, too; and those that are waited for have
smaller numbers and wait for nothing. For strips see ``strips``.
"""

import triton
import triton.language as tl

from f8sub.kernels.triton.grouped_casts import load_halves, load_lines, store_lines
from f8sub.kernels.triton.strips import group_of, lines_of
from f8sub.kernels.triton.tiles import (
    EXPONENT_BITS,
    amax_bits,
    codes,
    finite_or_nan,
    inverse,
    load,
    magnitude_bits,
    place,
    scale_from_amax,
    scaled,
    store,
    store_columns,
    store_zero_columns,
)


@triton.jit
def _mark_done(done_ptr):
    # The barrier has all threads' amaxes there before the number that tells of them.
    tl.debug_barrier()
    tl.atomic_add(done_ptr, 1, sem="release")


@triton.jit
def _wait(done_ptr, count):
    while tl.atomic_add(done_ptr, 0, sem="acquire") < count:
        pass


@triton.jit
def _amax(pointers, mask):
    # Of bits that order as amaxes do. From L2, where atomics are.
    return tl.load(pointers, mask=mask, other=0, cache_modifier=".cg").to(tl.float32, bitcast=True)


@triton.jit
def _turn(turns_ptr, N, EDGE: tl.constexpr, TILE: tl.constexpr):
    # The strip, whether it is cast, how many programs a strip has, and the tile of this one.
    tiles = tl.cdiv(N, TILE.COLS)
    parts = tiles * (EDGE // TILE.ROWS)
    turn = tl.load(turns_ptr + tl.program_id(0) // parts)
    part = tl.program_id(0) % parts
    strip = turn // 2
    return strip, turn % 2 == 1, parts, strip * EDGE + part // tiles * TILE.ROWS, part % tiles * TILE.COLS


@triton.jit
def _is_empty(ends_ptr, group, LINES):
    stop = tl.minimum(tl.load(ends_ptr + group), LINES)
    return stop <= tl.minimum(tl.load(ends_ptr + group - 1, mask=group > 0, other=0), LINES)


@triton.jit
def _is_first_of_group(strips_ptr, STRIPS, row, group, EDGE: tl.constexpr):
    before = tl.load(strips_ptr + 2 * STRIPS + row // EDGE - 1, mask=row >= EDGE, other=-1)
    return (row % EDGE == 0) & (before != group)


@triton.jit(do_not_specialize=["TURNS", "LINES"])
def quantize_lines_in_turn(
    x_ptr, ends_ptr, strips_ptr, turns_ptr, done_ptr, row_amax_ptr, row_ptr, row_scale_inv_ptr, col_amax_ptr,
    col_ptr, col_scale_inv_ptr, COUNT, STRIPS, TURNS, LINES, M, N,
    CAST: tl.constexpr, EDGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``grouped_casts.amax_of_group_lines`` and ``cast_group_lines``, in turn."""
    strip, casts, parts, row, col = _turn(turns_ptr, N, EDGE, TILE)
    ROWS: tl.constexpr = TILE.ROWS
    j = col + tl.arange(0, TILE.COLS)
    group = group_of(strips_ptr, STRIPS, row, EDGE)
    if casts:
        at = place(row // ROWS * tl.cdiv(N, TILE.COLS) + col // TILE.COLS, M, N, ROWS, TILE.COLS)
        if group >= COUNT:
            store_zero_columns(col_ptr, at, TILE)
        else:
            line, stop = lines_of(strips_ptr, STRIPS, row, 2, ROWS, EDGE)
            even, odd = load_halves(x_ptr, line, stop, col, N, TILE, "evict_first")
            _wait(done_ptr + group, tl.load(turns_ptr + 2 * TURNS + strip) * parts)
            if row_ptr is not None:
                even_scale = scale_from_amax(_amax(row_amax_ptr + line, line < stop), CAST)
                odd_scale = scale_from_amax(_amax(row_amax_ptr + line + 1, line + 1 < stop), CAST)
                store_lines(row_ptr, even, even_scale[:, None], line, line < stop, col, N, CAST, TILE)
                store_lines(row_ptr, odd, odd_scale[:, None], line + 1, line + 1 < stop, col, N, CAST, TILE)
                even_inverse, odd_inverse = (
                    inverse(even_scale, CAST.POWER_OF_2), inverse(odd_scale, CAST.POWER_OF_2),
                )  # fmt: skip
                tl.store(row_scale_inv_ptr + line, even_inverse, mask=(col == 0) & (line < stop))
                tl.store(row_scale_inv_ptr + line + 1, odd_inverse, mask=(col == 0) & (line + 1 < stop))
            scale = scale_from_amax(_amax(col_amax_ptr + group * N + j, j < N), CAST)
            store_columns(col_ptr, even, odd, scale[None, :], at, CAST, TILE, False)
            is_first = _is_first_of_group(strips_ptr, STRIPS, row, group, EDGE)
            scale_inv = inverse(scale, CAST.POWER_OF_2)
            tl.store(col_scale_inv_ptr + group * N + j, scale_inv, mask=(j < N) & is_first)
    else:
        if group < COUNT:
            line, stop = lines_of(strips_ptr, STRIPS, row, 1, ROWS, EDGE)
            x = tl.abs(load_lines(x_ptr, line, line < stop, col, N, TILE, "evict_last"))
            if row_amax_ptr is not None:
                of_rows = amax_bits(tl.max(x, 1))
                tl.atomic_max(row_amax_ptr + line, of_rows, mask=line < stop, sem="relaxed")
            of_columns = amax_bits(tl.max(x, 0))
            tl.atomic_max(col_amax_ptr + group * N + j, of_columns, mask=j < N, sem="relaxed")
            _mark_done(done_ptr + group)
        for one in range(strip, COUNT, TURNS):
            if (row % EDGE == 0) & _is_empty(ends_ptr, one, LINES):
                ones = tl.full((TILE.COLS,), 1.0, tl.float32)
                tl.store(col_scale_inv_ptr + one * N + j, ones, mask=j < N)


@triton.jit(do_not_specialize=["TURNS", "LINES"])
def quantize_groups_in_turn(
    x_ptr, ends_ptr, strips_ptr, turns_ptr, done_ptr, amax_ptr, row_ptr, row_scale_inv_ptr, col_ptr,
    col_scale_inv_ptr, COUNT, STRIPS, TURNS, LINES, M, N,
    CAST: tl.constexpr, EDGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``grouped_casts.amax_of_groups`` and ``cast_groups_with_one``, in turn."""
    strip, casts, parts, row, col = _turn(turns_ptr, N, EDGE, TILE)
    ROWS: tl.constexpr = TILE.ROWS
    group = group_of(strips_ptr, STRIPS, row, EDGE)
    if casts:
        at = place(row // ROWS * tl.cdiv(N, TILE.COLS) + col // TILE.COLS, M, N, ROWS, TILE.COLS)
        if group >= COUNT:
            store_zero_columns(col_ptr, at, TILE)
        else:
            line, stop = lines_of(strips_ptr, STRIPS, row, 2, ROWS, EDGE)
            even, odd = load_halves(x_ptr, line, stop, col, N, TILE, "evict_first")
            _wait(done_ptr + group, tl.load(turns_ptr + 2 * TURNS + strip) * parts)
            scale = scale_from_amax(_amax(amax_ptr + group, True), CAST)
            if row_ptr is not None:
                store_lines(row_ptr, even, scale, line, line < stop, col, N, CAST, TILE)
                store_lines(row_ptr, odd, scale, line + 1, line + 1 < stop, col, N, CAST, TILE)
            store_columns(col_ptr, even, odd, scale, at, CAST, TILE, False)
            is_first = (col == 0) & _is_first_of_group(strips_ptr, STRIPS, row, group, EDGE)
            scale_inv = inverse(scale, CAST.POWER_OF_2)
            if row_ptr is not None:
                tl.store(row_scale_inv_ptr + group, scale_inv, mask=is_first)
            tl.store(col_scale_inv_ptr + group, scale_inv, mask=is_first)
    else:
        if group < COUNT:
            line, stop = lines_of(strips_ptr, STRIPS, row, 1, ROWS, EDGE)
            bits = magnitude_bits(load_lines(x_ptr, line, line < stop, col, N, TILE, "evict_last"))
            tl.atomic_max(amax_ptr + group, tl.max(tl.where(bits < EXPONENT_BITS, bits, 0)), sem="relaxed")
            _mark_done(done_ptr + group)
        for one in range(strip, COUNT, TURNS):
            is_empty = (row % EDGE == 0) & (col == 0) & _is_empty(ends_ptr, one, LINES)
            if row_ptr is not None:
                tl.store(row_scale_inv_ptr + one, 1.0, mask=is_empty)
            tl.store(col_scale_inv_ptr + one, 1.0, mask=is_empty)


@triton.jit
def quantize_bands_in_turn(
    x_ptr, done_ptr, amax_ptr, row_ptr, row_scale_inv_ptr, BANDS, AHEAD, SIZE, STRIDE,
    CAST: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """``casts.amax_of_bands`` and ``cast_bands``, in turn: a band is cast after AHEAD more were read, fewer than BANDS.

    After the first ones, bands that are cast and bands that are read alternate.
    """
    parts = tl.cdiv(SIZE, BLOCK)
    turn, start = tl.program_id(0) // parts - (AHEAD + 1), tl.program_id(0) % parts * BLOCK
    alternate = BANDS - (AHEAD + 1)
    is_cast = (turn >= 0) & ((turn >= 2 * alternate) | (turn % 2 == 0))
    band = AHEAD + 1 + turn
    if is_cast:
        band = tl.where(turn < 2 * alternate, turn // 2, turn - alternate)
    elif turn >= 0:
        band = AHEAD + 1 + turn // 2
    offsets = tl.arange(0, BLOCK)
    inside = offsets < SIZE - start
    pointers = x_ptr + band.to(tl.int64) * STRIDE + start + offsets
    if is_cast:
        x = load(pointers, inside, WHOLE, "evict_first").to(tl.float32)
        _wait(done_ptr + band, parts)
        scale = scale_from_amax(_amax(amax_ptr + band, True), CAST)
        made = codes(scaled(finite_or_nan(x), scale, CAST, False), CAST.CODES)
        store(row_ptr + band.to(tl.int64) * SIZE + start + offsets, made, inside, WHOLE)
        tl.store(row_scale_inv_ptr + band, inverse(scale, CAST.POWER_OF_2), mask=start == 0)
    else:
        bits = magnitude_bits(load(pointers, inside, WHOLE, "evict_last").to(tl.float32))
        tl.atomic_max(amax_ptr + band, tl.max(tl.where(bits < EXPONENT_BITS, bits, 0)), sem="relaxed")
        _mark_done(done_ptr + band)
