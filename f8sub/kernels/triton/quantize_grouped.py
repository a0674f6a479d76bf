"""Kernels that quantize groups of rows, which follow each other in x, for both usages; and the layout of the groups.

[Note] Strips. In the columnwise data, and in data of squares, each group begins at a multiple of EDGE. Programs walk
over rows that are laid out so. A table, int32, (3, STRIPS), tells of each EDGE rows of them, a strip, which row of x
the first one is, where its group ends in x, and which group that is: the number of groups where it is none, as it is
after the last group's. A row that no row of x belongs to counts as zeros. ``line`` is a row of x, ``at.row`` a row as
laid out, ``at.M`` their number.
"""

import triton
import triton.language as tl

from f8sub.kernels.triton.tile_ops import (
    EXPONENT_BITS,
    amax_bits,
    codes,
    factor_of,
    finite_or_nan,
    inverse,
    larger_magnitude,
    magnitude_bits,
    moved,
    place,
    row_taken,
    scale_from_amax,
    scaled,
    store_columns,
    store_scales_of_group_square,
    store_with_one,
    store_zero_columns,
)

RECORD = tl.constexpr(8)
"""Numbers of a turn, of which six are used. Their loads do not wait for each other."""

AT_ONCE = tl.constexpr(1024)
"""Zeros that a program of ``lay_out`` writes at a time: 16 bytes a thread."""


@triton.jit
def _store_turns(turns_ptr, place, mask, strip, is_cast, line, stop, group, first, end):
    record = turns_ptr + RECORD * place
    tl.store(record, 2 * strip + is_cast, mask=mask)
    tl.store(record + 1, line, mask=mask)
    tl.store(record + 2, stop, mask=mask)
    tl.store(record + 3, group, mask=mask)
    tl.store(record + 4, first, mask=mask)
    tl.store(record + 5, end - first, mask=mask)


@triton.jit
def load_turn(turns_ptr, place):
    """Load a turn: its strip, whether that is cast, the strip's row of x, where its group ends there, and which it is.

    Then the first strip of that group, and how many it has.
    """
    record = turns_ptr + RECORD * place
    turn, line, stop = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    group, first, count = tl.load(record + 3), tl.load(record + 4), tl.load(record + 5)
    return turn // 2, turn % 2 == 1, line, stop, group, first, count


@triton.jit
def _group_at(after, is_group, strip):
    # How many groups end before a strip, and with which strip the next one begins.
    is_over = (after[None, :] <= strip[:, None]) & is_group[None, :]
    return tl.sum(is_over.to(tl.int32), 1), tl.max(tl.where(is_over, after[None, :], 0), 1)


@triton.jit(do_not_specialize=["ROWS", "TURNS", "ZEROS"])
def lay_out(
    ends_ptr, strips_ptr, turns_ptr, zeros_ptr, first_ptr, laid_ends_ptr, COUNT, ROWS, STRIPS, TURNS, ZEROS, LOOKAHEAD,
    EDGE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the table of strips; unless pointers are None turns, ZEROS zeros, and where groups are laid out.

    BLOCK strips per program. GROUPS is at least COUNT. The group of a strip is the number of groups that end before it.
    """
    if zeros_ptr is not None:
        offsets = tl.arange(0, AT_ONCE)
        for begin in range(tl.program_id(0) * AT_ONCE, ZEROS, tl.num_programs(0) * AT_ONCE):
            inside = offsets < ZEROS - begin
            tl.store(zeros_ptr + begin + offsets, tl.zeros((AT_ONCE,), tl.int32), mask=inside)
    group = tl.arange(0, GROUPS)
    is_group = group < COUNT
    # Ends beyond x are the user's error, and no reason to read or write there.
    ends = tl.minimum(tl.load(ends_ptr + group, mask=is_group, other=0), ROWS)
    first = tl.minimum(tl.load(ends_ptr + group - 1, mask=is_group & (group > 0), other=0), ROWS)
    count = tl.maximum(ends - first, 0)
    room = tl.cdiv(count, EDGE)
    # after [GROUPS]: strips of all groups up to each, empty groups have none.
    after = tl.cumsum(room, 0)
    if first_ptr is not None:
        writes = is_group & (tl.program_id(0) == 0)
        laid_first = (after - room) * EDGE
        tl.store(first_ptr + group, laid_first, mask=writes)
        tl.store(laid_ends_ptr + group, laid_first + count, mask=writes)
    strip = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found, begin = _group_at(after, is_group, strip)
    is_found = found < COUNT
    stop = tl.minimum(tl.load(ends_ptr + found, mask=is_found, other=0), ROWS)
    start = tl.minimum(tl.load(ends_ptr + found - 1, mask=is_found & (found > 0), other=0), ROWS)
    is_strip = strip < STRIPS
    # row 0 of the table: the strip's first row of x; row 1: its group's end; row 2: its group
    tl.store(strips_ptr + strip, tl.where(is_found, start + (strip - begin) * EDGE, 0), mask=is_strip)
    tl.store(strips_ptr + STRIPS + strip, stop, mask=is_strip)
    tl.store(strips_ptr + 2 * STRIPS + strip, found, mask=is_strip)
    if turns_ptr is not None:
        # A group's strips are cast LOOKAHEAD strips after its last one was read; a strip of no group is by itself.
        of_group = tl.where(is_found, begin, strip)
        end = tl.minimum(of_group + tl.where(is_found, tl.cdiv(stop - start, EDGE), 1), TURNS)
        before, casts = _group_at(after, is_group, strip - LOOKAHEAD)
        casts = tl.where(before < COUNT, casts, strip - LOOKAHEAD)
        read_at = tl.where(strip < LOOKAHEAD, strip, strip + casts)
        cast_at = strip + tl.minimum(end + LOOKAHEAD, TURNS)
        line = start + (strip - begin) * EDGE
        is_turn = strip < TURNS
        _store_turns(turns_ptr, read_at, is_turn, strip, 0, line, stop, found, of_group, end)
        _store_turns(turns_ptr, cast_at, is_turn, strip, 1, line, stop, found, of_group, end)


@triton.jit
def lines_of(strips_ptr, STRIPS, row, STEP: tl.constexpr, ROWS: tl.constexpr, EDGE: tl.constexpr):
    """Return the row of x for each STEP-th of ROWS laid out rows from ``row`` on, and where its group ends in x.

    It is a row of x where it is less than that end. All of one strip have one end.
    """
    i = STEP * tl.arange(0, ROWS // STEP)
    if EDGE % ROWS == 0:
        # One strip has all ROWS of them, so one lookup does.
        strip = row // EDGE
        line = tl.load(strips_ptr + strip) + row % EDGE + i
    else:
        strip = (row + i) // EDGE
        line = tl.load(strips_ptr + strip) + (row + i) % EDGE
    return line, tl.load(strips_ptr + STRIPS + strip)


@triton.jit
def group_of(strips_ptr, STRIPS, row, EDGE: tl.constexpr):
    """Return the group of rows as laid out."""
    return tl.load(strips_ptr + 2 * STRIPS + row // EDGE)


@triton.jit
def is_past(strips_ptr, STRIPS, row, EDGE: tl.constexpr):
    """Return whether a row as laid out is after the last group, as all after it are then."""
    return tl.load(strips_ptr + STRIPS + row // EDGE) == 0


@triton.jit
def load_lines(x_ptr, index_ptr, factor_ptr, line, is_line, col, N, TILE: tl.constexpr, KEEP: tl.constexpr):
    """Load columns of rows of x, float32, (rows, COLS), NaN for infinity; zeros where ``is_line`` is not.

    Of ``operands.Taken`` a row is the one that its index names, times its factor; pointers are None of what is not.
    """
    j = tl.arange(0, TILE.COLS)
    row = line.to(tl.int64) if index_ptr is None else row_taken(index_ptr, line, is_line)
    pointers = x_ptr + row[:, None] * N + col + j[None, :]
    inside = is_line[:, None] if TILE.WHOLE else is_line[:, None] & (col + j < N)[None, :]
    x = tl.load(pointers, mask=inside, other=0.0, eviction_policy=KEEP)
    if factor_ptr is not None:
        # Rounded to the dtype of x, as PyTorch's product is.
        product = x.to(tl.float32) * factor_of(factor_ptr, line, is_line)[:, None]
        x = product.to(x_ptr.dtype.element_ty)
    return finite_or_nan(x.to(tl.float32))


@triton.jit
def load_halves(x_ptr, index_ptr, factor_ptr, line, stop, col, N, TILE: tl.constexpr, KEEP: tl.constexpr):
    """Load even and odd rows of a tile, float32, each (ROWS / 2, COLS); ``line`` are the even ones."""
    even = load_lines(x_ptr, index_ptr, factor_ptr, line, line < stop, col, N, TILE, KEEP)
    return even, load_lines(x_ptr, index_ptr, factor_ptr, line + 1, line + 1 < stop, col, N, TILE, KEEP)


@triton.jit
def store_lines(row_ptr, x, scale, line, is_line, col, N, CAST: tl.constexpr, TILE: tl.constexpr):
    """Cast columns of rows of x and store them in the rowwise data, whose rows are those of x."""
    j = tl.arange(0, TILE.COLS)
    pointers = row_ptr + line.to(tl.int64)[:, None] * N + col + j[None, :]
    inside = is_line[:, None] if TILE.WHOLE else is_line[:, None] & (col + j < N)[None, :]
    tl.store(pointers, codes(scaled(x, scale, CAST, False), CAST.CODES), mask=inside)


@triton.jit
def store_vectors(row_ptr, scales, x, line, is_line, col, N, CAST: tl.constexpr, TILE: tl.constexpr):
    """Cast rows of x with one scale per row and COLS columns; store rowwise data and inverse scales."""
    scale = scale_from_amax(tl.max(tl.abs(x), 1), CAST)
    store_lines(row_ptr, x, scale[:, None], line, is_line, col, N, CAST, TILE)
    tl.store(scales + line, inverse(scale, CAST.POWER_OF_2), mask=is_line)


@triton.jit
def amax_of_groups(
    x_ptr, index_ptr, factor_ptr, strips_ptr, amax_ptr, COUNT, STRIPS, M, N,
    EDGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Take the atomic maximum of the finite elements of each group, (COUNT,), int32."""
    at = place(tl.program_id(0), M, N, TILE.ROWS, TILE.COLS)
    ROWS: tl.constexpr = TILE.ROWS
    line, stop = lines_of(strips_ptr, STRIPS, at.row, 1, ROWS, EDGE)
    x = load_lines(x_ptr, index_ptr, factor_ptr, line, line < stop, at.col, N, TILE, "")
    bits = magnitude_bits(x)
    of_lines = tl.max(tl.where(bits < EXPONENT_BITS, bits, 0), 1)
    first = group_of(strips_ptr, STRIPS, at.row, EDGE)
    if EDGE % ROWS == 0:
        is_one = True
    else:
        is_one = first == group_of(strips_ptr, STRIPS, at.row + ROWS - 1, EDGE)
    # One atomic for most programs; a tile of several groups has one for each strip.
    if is_one:
        tl.atomic_max(amax_ptr + first, tl.max(of_lines), mask=first < COUNT, sem="relaxed")
    else:
        PARTS: tl.constexpr = (ROWS + EDGE - 1) // EDGE
        group = group_of(strips_ptr, STRIPS, at.row + EDGE * tl.arange(0, PARTS), EDGE)
        of_strips = tl.max(tl.reshape(of_lines, (PARTS, ROWS // PARTS)), 1)
        tl.atomic_max(amax_ptr + group, of_strips, mask=group < COUNT, sem="relaxed")


@triton.jit
def cast_groups_with_one(
    x_ptr, index_ptr, factor_ptr, strips_ptr, amax_ptr, row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr,
    COUNT, STRIPS, M, N, CAST: tl.constexpr, EDGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Cast with one scale per group, of its amax, for each usage whose pointer is not None.

    Programs take the last tile first: what an amax was taken from last is still in L2.
    """
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    at = place(index, M, N, TILE.ROWS, TILE.COLS)
    # By all programs: an empty group has no tile of its own, and its scale is stored all the same.
    for one in range(index, COUNT, tl.num_programs(0)):
        # scale_inv (COUNT, 1)
        scale_inv = inverse(scale_from_amax(tl.load(amax_ptr + one), CAST), CAST.POWER_OF_2)
        if row_ptr is not None:
            tl.store(row_scale_inv_ptr + one, scale_inv)
        if col_ptr is not None:
            tl.store(col_scale_inv_ptr + one, scale_inv)
    line, stop = lines_of(strips_ptr, STRIPS, at.row, 2, TILE.ROWS, EDGE)
    if is_past(strips_ptr, STRIPS, at.row, EDGE):
        if col_ptr is not None:
            store_zero_columns(col_ptr, at, TILE)
        return
    even, odd = load_halves(x_ptr, index_ptr, factor_ptr, line, stop, at.col, N, TILE, "evict_first")
    group = group_of(strips_ptr, STRIPS, at.row + 2 * tl.arange(0, TILE.ROWS // 2), EDGE)
    amax = tl.load(amax_ptr + group, mask=group < COUNT, other=0.0)
    scale = scale_from_amax(amax, CAST)[:, None]
    if row_ptr is not None:
        store_lines(row_ptr, even, scale, line, line < stop, at.col, N, CAST, TILE)
        store_lines(row_ptr, odd, scale, line + 1, line + 1 < stop, at.col, N, CAST, TILE)
    if col_ptr is not None:
        store_columns(col_ptr, even, odd, scale, at, CAST, TILE, False)


@triton.jit
def amax_of_group_lines(
    x_ptr, index_ptr, factor_ptr, strips_ptr, row_amax_ptr, col_amax_ptr, COUNT, STRIPS, M, N,
    STEPS: tl.constexpr, STAGES: tl.constexpr, EDGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Take atomic maxima of each row of x, unless its pointer is None, and of each column of each group, (COUNT, N).

    A program goes down STEPS tiles of the same columns, ROWS of which are a strip or less. It reduces the columns'
    amaxes where a group ends, and once more at its end.
    """
    first = place(tl.program_id(0), M, N, TILE.ROWS * STEPS, TILE.COLS)
    ROWS: tl.constexpr = TILE.ROWS
    COLS: tl.constexpr = TILE.COLS
    j = first.col + tl.arange(0, COLS)
    current = group_of(strips_ptr, STRIPS, first.row, EDGE)
    largest = tl.zeros((ROWS, COLS), tl.float32)
    for step in tl.range(0, tl.minimum(STEPS, tl.cdiv(M - first.row, ROWS)), num_stages=STAGES):
        row = first.row + step * ROWS
        line, stop = lines_of(strips_ptr, STRIPS, row, 1, ROWS, EDGE)
        x = load_lines(x_ptr, index_ptr, factor_ptr, line, line < stop, first.col, N, TILE, "")
        group = group_of(strips_ptr, STRIPS, row, EDGE)
        if group != current:
            bits = amax_bits(tl.max(largest, 0))
            tl.atomic_max(col_amax_ptr + current * N + j, bits, mask=j < N, sem="relaxed")
            largest = tl.zeros((ROWS, COLS), tl.float32)
            current = group
        if row_amax_ptr is not None:
            bits = amax_bits(tl.max(tl.abs(x), 1))
            tl.atomic_max(row_amax_ptr + line, bits, mask=line < stop, sem="relaxed")
        largest = larger_magnitude(largest, x)
    bits = amax_bits(tl.max(largest, 0))
    inside = (j < N) & (current < COUNT)
    tl.atomic_max(col_amax_ptr + current * N + j, bits, mask=inside, sem="relaxed")


@triton.jit
def quantize_group_squares(
    x_ptr, index_ptr, factor_ptr, strips_ptr, row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr, STRIPS, M, N,
    CAST: tl.constexpr, EDGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Quantize squares of EDGE x EDGE, laid out, for each usage whose pointer is not None; see ``quantize_squares``.

    A square is read in parts of (ROWS, COLS) for its amax. The last part stays in registers; those before it are read
    once more to be cast.
    """
    square = place(tl.program_id(0), M, N, EDGE, EDGE)
    DOWN: tl.constexpr = EDGE // TILE.ROWS
    LAST: tl.constexpr = DOWN * (EDGE // TILE.COLS) - 1
    amax = 0.0
    for part in range(LAST):
        at = moved(square, part % DOWN * TILE.ROWS, part // DOWN * TILE.COLS)
        line, stop = lines_of(strips_ptr, STRIPS, at.row, 2, TILE.ROWS, EDGE)
        even, odd = load_halves(x_ptr, index_ptr, factor_ptr, line, stop, at.col, N, TILE, "evict_last")
        amax = larger_magnitude(amax, tl.max(larger_magnitude(even, odd)))
    end = moved(square, LAST % DOWN * TILE.ROWS, LAST // DOWN * TILE.COLS)
    line, stop = lines_of(strips_ptr, STRIPS, end.row, 2, TILE.ROWS, EDGE)
    even, odd = load_halves(x_ptr, index_ptr, factor_ptr, line, stop, end.col, N, TILE, "evict_first")
    amax = larger_magnitude(amax, tl.max(larger_magnitude(even, odd)))
    scale = scale_from_amax(amax, CAST)
    store_with_one(row_ptr, col_ptr, even, odd, scale, end, CAST, TILE, False)
    for done in range(LAST):
        part = LAST - 1 - done
        at = moved(square, part % DOWN * TILE.ROWS, part // DOWN * TILE.COLS)
        line, stop = lines_of(strips_ptr, STRIPS, at.row, 2, TILE.ROWS, EDGE)
        even, odd = load_halves(x_ptr, index_ptr, factor_ptr, line, stop, at.col, N, TILE, "evict_first")
        store_with_one(row_ptr, col_ptr, even, odd, scale, at, CAST, TILE, False)
    scale_inv = inverse(scale, CAST.POWER_OF_2)
    store_scales_of_group_square(
        row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr, scale_inv, square, EDGE
    )


@triton.jit
def quantize_group_exponents(
    x_ptr, index_ptr, factor_ptr, strips_ptr, row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr, STRIPS, M, N,
    CAST: tl.constexpr, EDGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Quantize tiles of 1 x EDGE and EDGE x 1 with exponents as scales, for each usage whose pointer is not None.

    EDGE divides ROWS and COLS. Exponents are bytes, those of one row of data side by side.
    """
    at = place(tl.program_id(0), M, N, TILE.ROWS, TILE.COLS)
    line, stop = lines_of(strips_ptr, STRIPS, at.row, 2, TILE.ROWS, EDGE)
    even, odd = load_halves(x_ptr, index_ptr, factor_ptr, line, stop, at.col, N, TILE, "evict_first")
    if row_ptr is not None:
        _store_exponent_vectors(
            row_ptr, row_scale_inv_ptr, even, line, line < stop, at.col, N, CAST, EDGE, TILE
        )
        _store_exponent_vectors(
            row_ptr, row_scale_inv_ptr, odd, line + 1, line + 1 < stop, at.col, N, CAST, EDGE, TILE
        )
    if col_ptr is not None:
        DOWN: tl.constexpr = TILE.ROWS // EDGE
        COLS: tl.constexpr = TILE.COLS
        # (tiles down, EDGE / 2, COLS): each tile of EDGE x 1 is EDGE / 2 pairs of rows
        largest = tl.reshape(larger_magnitude(even, odd), (DOWN, EDGE // 2, COLS))
        scale = scale_from_amax(tl.max(largest, 1), CAST)
        spread = tl.broadcast_to(scale[:, None, :], (DOWN, EDGE // 2, COLS))
        spread = tl.reshape(spread, (DOWN * (EDGE // 2), COLS))
        store_columns(col_ptr, even, odd, spread, at, CAST, TILE, False)
        i, j = at.row // EDGE + tl.arange(0, DOWN), at.col + tl.arange(0, COLS)
        pointers = col_scale_inv_ptr + i.to(tl.int64)[:, None] * N + j[None, :]
        tl.store(pointers, _exponents(scale), mask=(i < M // EDGE)[:, None] & (j < N)[None, :])


@triton.jit
def _exponents(scale):
    # The bytes of the inverses of powers of two.
    return (inverse(scale, True).to(tl.int32, bitcast=True) >> 23).to(tl.uint8)


@triton.jit
def _store_exponent_vectors(
    row_ptr, row_scale_inv_ptr, x, line, is_line, col, N,
    CAST: tl.constexpr, EDGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = TILE.ROWS // 2
    ALONG: tl.constexpr = TILE.COLS // EDGE
    # (ROWS / 2, tiles along, EDGE)
    scale = scale_from_amax(tl.max(tl.reshape(tl.abs(x), (HALF, ALONG, EDGE)), 2), CAST)
    spread = tl.broadcast_to(scale[:, :, None], (HALF, ALONG, EDGE))
    store_lines(row_ptr, x, tl.reshape(spread, (HALF, TILE.COLS)), line, is_line, col, N, CAST, TILE)
    tiles, k = tl.cdiv(N, EDGE), col // EDGE + tl.arange(0, ALONG)
    pointers = row_scale_inv_ptr + line.to(tl.int64)[:, None] * tiles + k[None, :]
    tl.store(pointers, _exponents(scale), mask=is_line[:, None] & (k < tiles)[None, :])
