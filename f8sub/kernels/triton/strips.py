"""Where rows of groups lie once they are laid out, and in which order programs take them.

[Note] Strips. In the columnwise codes, and in codes of squares, each group begins at a multiple of EDGE. Programs walk
over rows that are laid out so. A table, int32, (3, STRIPS), tells of each EDGE rows of them, a strip, which row of x
the first one is, where its group ends in x, and which group that is: the number of groups where it is none, as it is
after the last group's. A row that no row of x belongs to counts as zeros. ``line`` is a row of x, ``at.row`` a row as
laid out, ``at.M`` their number.
"""

import triton
import triton.language as tl


@triton.jit
def _order_turns(turns_ptr, TURNS, strip, begin, stop, start, is_found, AHEAD, EDGE: tl.constexpr):
    """Write the order of turns, which is twice TURNS, and the number of each group's strips after it.

    Of strips: their numbers, the first one of their group, where it ends and begins in x, and whether there is one; a
    strip of no group is by itself. A turn is twice a strip, one more where it is cast. A group's strips are cast AHEAD
    strips after its last one was read.
    """
    first = tl.where(is_found, begin, strip)
    count = tl.where(is_found, tl.cdiv(stop - start, EDGE), 1)
    end = tl.minimum(first + count, TURNS)
    is_strip = strip < TURNS
    tl.store(turns_ptr + 2 * TURNS + strip, end - first, mask=is_strip)
    tl.store(turns_ptr + strip + tl.minimum(end + AHEAD, TURNS), 2 * strip + 1, mask=is_strip)
    tl.store(turns_ptr + strip, 2 * strip, mask=is_strip & (strip < AHEAD))
    later = strip + AHEAD
    tl.store(turns_ptr + later + first, 2 * later, mask=is_strip & (later < TURNS))


@triton.jit(do_not_specialize=["ROWS", "TURNS"])
def lay_out(
    ends_ptr, strips_ptr, turns_ptr, first_ptr, laid_ends_ptr, COUNT, ROWS, STRIPS, TURNS, AHEAD,
    EDGE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The table of strips; unless pointers are None where groups are laid out, and turns. BLOCK strips a program.

    GROUPS is at least COUNT. The group of a strip is the number of groups that end before it.
    """
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
    is_over = (after[None, :] <= strip[:, None]) & is_group[None, :]
    found = tl.sum(is_over.to(tl.int32), 1)
    begin = tl.max(tl.where(is_over, after[None, :], 0), 1)
    is_found = found < COUNT
    stop = tl.minimum(tl.load(ends_ptr + found, mask=is_found, other=0), ROWS)
    start = tl.minimum(tl.load(ends_ptr + found - 1, mask=is_found & (found > 0), other=0), ROWS)
    is_strip = strip < STRIPS
    tl.store(strips_ptr + strip, tl.where(is_found, start + (strip - begin) * EDGE, 0), mask=is_strip)
    tl.store(strips_ptr + STRIPS + strip, stop, mask=is_strip)
    tl.store(strips_ptr + 2 * STRIPS + strip, found, mask=is_strip)
    if turns_ptr is not None:
        _order_turns(turns_ptr, TURNS, strip, begin, stop, start, is_found, AHEAD, EDGE)


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
