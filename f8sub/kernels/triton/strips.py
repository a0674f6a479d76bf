"""Where rows of groups lie once they are laid out, and in which order programs take them.

[Note] Strips. In the columnwise codes, and in codes of squares, each group begins at a multiple of EDGE. Programs walk
over rows that are laid out so. A table, int32, (3, STRIPS), tells of each EDGE rows of them, a strip, which row of x
the first one is, where its group ends in x, and which group that is: the number of groups where it is none, as it is
after the last group's. A row that no row of x belongs to counts as zeros. ``line`` is a row of x, ``at.row`` a row as
laid out, ``at.M`` their number.
"""

import triton
import triton.language as tl

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
    """Of a turn: its strip, whether that is cast, the strip's row of x, where its group ends there, and which it is.

    And the first strip of that group, and how many it has.
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
    ends_ptr, strips_ptr, turns_ptr, zeros_ptr, first_ptr, laid_ends_ptr, COUNT, ROWS, STRIPS, TURNS, ZEROS, AHEAD,
    EDGE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The table of strips; unless pointers are None turns, ZEROS zeros, and where groups are laid out.

    BLOCK strips a program. GROUPS is at least COUNT. The group of a strip is the number of groups that end before it.
    """
    if zeros_ptr is not None:
        offsets = tl.arange(0, AT_ONCE)
        for begin in range(tl.program_id(0) * AT_ONCE, ZEROS, tl.num_programs(0) * AT_ONCE):
            inside = offsets < ZEROS - begin
            tl.store(zeros_ptr + begin + offsets, tl.zeros((AT_ONCE,), tl.int32), mask=inside)
    group = tl.arange(0, GROUPS)
    is_group = group < COUNT
    ends = tl.minimum(tl.load(ends_ptr + group, mask=is_group, other=0), ROWS)
    first = tl.minimum(tl.load(ends_ptr + group - 1, mask=is_group & (group > 0), other=0), ROWS)
    count = tl.maximum(ends - first, 0)
    room = tl.cdiv(count, EDGE)
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
    tl.store(strips_ptr + strip, tl.where(is_found, start + (strip - begin) * EDGE, 0), mask=is_strip)
    tl.store(strips_ptr + STRIPS + strip, stop, mask=is_strip)
    tl.store(strips_ptr + 2 * STRIPS + strip, found, mask=is_strip)
    if turns_ptr is not None:
        # A group's strips are cast AHEAD strips after its last one was read; a strip of no group is by itself.
        of_group = tl.where(is_found, begin, strip)
        end = tl.minimum(of_group + tl.where(is_found, tl.cdiv(stop - start, EDGE), 1), TURNS)
        before, casts = _group_at(after, is_group, strip - AHEAD)
        casts = tl.where(before < COUNT, casts, strip - AHEAD)
        read_at = tl.where(strip < AHEAD, strip, strip + casts)
        cast_at = strip + tl.minimum(end + AHEAD, TURNS)
        line = start + (strip - begin) * EDGE
        is_turn = strip < TURNS
        _store_turns(turns_ptr, read_at, is_turn, strip, 0, line, stop, found, of_group, end)
        _store_turns(turns_ptr, cast_at, is_turn, strip, 1, line, stop, found, of_group, end)


@triton.jit
def lines_of(strips_ptr, STRIPS, row, STEP: tl.constexpr, ROWS: tl.constexpr, EDGE: tl.constexpr):
    """Of each STEP-th of ROWS rows from ``row`` on the row of x that it is, and where its group ends in x.

    It is a row of x where that is less. All of one strip have one end.
    """
    i = STEP * tl.arange(0, ROWS // STEP)
    if EDGE % ROWS == 0:
        strip = row // EDGE
        line = tl.load(strips_ptr + strip) + row % EDGE + i
    else:
        strip = (row + i) // EDGE
        line = tl.load(strips_ptr + strip) + (row + i) % EDGE
    return line, tl.load(strips_ptr + STRIPS + strip)


@triton.jit
def group_of(strips_ptr, STRIPS, row, EDGE: tl.constexpr):
    """The group of rows as laid out."""
    return tl.load(strips_ptr + 2 * STRIPS + row // EDGE)


@triton.jit
def is_past(strips_ptr, STRIPS, row, EDGE: tl.constexpr):
    """Whether a row as laid out is after the last group, as all after it are then."""
    return tl.load(strips_ptr + STRIPS + row // EDGE) == 0
