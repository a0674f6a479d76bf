"""Grouped products, in Triton: rows with the matrix of their group, and sums over the rows of each group.

Where groups lie is known to the GPU alone. So a first kernel writes a table of the tiles, and a second one multiplies
them: ``multiply_groups`` of any number of columns, or ``gemm_sm90.multiply_persistently``.

By rows, (M, K) x (E, N, K) -> (M, N), the table begins with the number of tiles along M, padded to ``FIELDS``; then
comes a row per tile: the group, its first row in ``a``, its first row in the result, and the row there after the
group's last one. By sums, (N, M) x (K, M) -> (E, N, K), it has a row per group, the longest first: the group, its first
block of 128 rows, and the number of blocks.
"""

import triton
import triton.language as tl

from f8sub.kernels.triton.gemm import scaled, scales_at


@triton.jit
def clear_from(first, out_ptr, M, N, BLOCK: tl.constexpr):
    """Write zeros in the rows of a matrix from ``first`` on, by all programs."""
    zeros = tl.zeros((BLOCK,), out_ptr.dtype.element_ty)
    for past in range(first + tl.program_id(0), M, tl.num_programs(0)):
        # int64: M * N may exceed 2**31.
        row = past + tl.zeros((BLOCK,), tl.int64)
        for col in range(0, N, BLOCK):
            j = col + tl.arange(0, BLOCK)
            tl.store(out_ptr + row * N + j, zeros, mask=j < N)


# Tokens come in another number each step: Triton would compile again where one is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["M", "N", "GROUPS"])
def table_of_rows(
    first_ptr, ends_ptr, placed_ptr, table_ptr, out_ptr, M, N, GROUPS,
    ROWS: tl.constexpr, MOST: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the table of tiles of ROWS rows, AT_ONCE per program, and zeros in the result's rows past the last group.

    Groups are rows ``first`` to ``ends`` of the result, and begin at row ``placed`` of ``a``; MOST is a power of two,
    no fewer than GROUPS.
    """
    group = tl.arange(0, MOST)
    is_group = group < GROUPS
    # Ends that lie outside of the matrix are the user's error, and no reason to write there.
    ends = tl.minimum(tl.load(ends_ptr + group, mask=is_group, other=0), M)
    first = tl.load(first_ptr + group, mask=is_group, other=0)
    # until [MOST]: tiles of all groups up to each. A slot's group is the number of those that end before it.
    until = tl.cumsum((tl.maximum(ends - first, 0) + (ROWS - 1)) // ROWS, 0)
    count = tl.max(until, 0)
    slot = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    is_before = (until[None, :] <= slot[:, None]) & is_group[None, :]
    own = tl.sum(is_before.to(tl.int32), 1)
    begin = tl.max(tl.where(is_before, until[None, :], 0), 1)
    is_tile = (slot < count) & (own < GROUPS)
    row = (slot - begin) * ROWS
    entry = table_ptr + (slot + 1) * 4
    tl.store(entry, own, mask=is_tile)
    tl.store(entry + 1, tl.load(placed_ptr + own, mask=is_tile, other=0) + row, mask=is_tile)
    tl.store(entry + 2, tl.load(first_ptr + own, mask=is_tile, other=0) + row, mask=is_tile)
    end = tl.minimum(tl.load(ends_ptr + own, mask=is_tile, other=0), M)
    tl.store(entry + 3, end, mask=is_tile)
    if tl.program_id(0) == 0:
        # No more tiles than the table has rows for, whatever the ends are.
        tl.store(table_ptr, tl.minimum(count, tl.num_programs(0) * AT_ONCE))
    clear_from(tl.max(ends, 0), out_ptr, M, N, BLOCK)


@triton.jit(do_not_specialize=["M", "N", "GROUPS"])
def clear_past(ends_ptr, out_ptr, M, N, GROUPS, BLOCK: tl.constexpr):
    """Write zeros in the rows of a matrix past the last group."""
    clear_from(tl.load(ends_ptr + GROUPS - 1), out_ptr, M, N, BLOCK)


@triton.jit(do_not_specialize=["GROUPS"])
def table_of_groups(first_ptr, ends_ptr, table_ptr, GROUPS, MOST: tl.constexpr, AT_ONCE: tl.constexpr):
    """Write the table of groups that begin at multiples of 128 rows, AT_ONCE per program; see ``table_of_rows``."""
    group = tl.arange(0, MOST)
    is_group = group < GROUPS
    counts = tl.load(ends_ptr + group, mask=is_group, other=0) - tl.load(
        first_ptr + group, mask=is_group, other=0
    )
    blocks = (tl.maximum(counts, 0) + 127) // 128
    own = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    is_own = own < GROUPS
    first = tl.load(first_ptr + own, mask=is_own, other=0)
    count = tl.load(ends_ptr + own, mask=is_own, other=0) - first
    own_blocks = (tl.maximum(count, 0) + 127) // 128
    is_longer = blocks[None, :] > own_blocks[:, None]
    is_before = (blocks[None, :] == own_blocks[:, None]) & (group[None, :] < own[:, None])
    # The longest groups first, so that no long one begins when the other programs are nearly done.
    rank = tl.sum(((is_longer | is_before) & is_group[None, :]).to(tl.int32), 1)
    entry = table_ptr + rank * 4
    tl.store(entry, own, mask=is_own)
    tl.store(entry + 1, first // 128, mask=is_own)
    tl.store(entry + 2, own_blocks, mask=is_own)


@triton.jit
def scale_of_sum(scale, group, first, inside, SIDE: tl.constexpr, LINES: tl.constexpr):
    """Load scales that are applied to a whole sum: one per row or column from ``first`` on, or one of the group."""
    if SIDE.is_by_line:
        return tl.load(scale + first + tl.arange(0, LINES), mask=inside, other=0.0)
    else:
        return tl.load(scale + group)


@triton.jit(do_not_specialize=["M", "BLOCKS", "A_LINES", "B_LINES", "a_stride", "b_stride", "b_group_stride"])
def multiply_groups(
    a, b, a_scale, b_scale, out_ptr, added_ptr, table_ptr, M, N, BLOCKS, A_LINES, B_LINES, a_stride, b_stride,
    b_group_stride,
    A: tl.constexpr, B: tl.constexpr, CONFIG: tl.constexpr, OVER_ROWS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Multiply one tile per program, of those that there may be.

    By rows M is not read, N are the columns of each group's matrix and BLOCKS those of K; over rows the results of all
    groups are (M, N). ``a`` and ``b`` are descriptors of blocks of (rows, 128) and (cols, 128), of A_LINES and B_LINES
    rows in all. A and B are ``gemm_launch.ScaleBlock``s. FAST leaves sums to the tensor cores' accumulators. A matrix
    ``added_ptr`` like the result is added to it, unless it is None.
    """
    ROWS: tl.constexpr = CONFIG.rows
    COLS: tl.constexpr = CONFIG.cols
    GROUP: tl.constexpr = CONFIG.group
    tile = tl.program_id(0)
    across = tl.cdiv(N, COLS)
    entry = table_ptr
    if OVER_ROWS:
        down = tl.cdiv(M, ROWS)
        entry = table_ptr + tile // (down * across) * 4
        tile = tile % (down * across)
    else:
        down = tl.load(table_ptr)
    # The host launches as many programs as there may be tiles; the GPU alone knows how many there are.
    if tile >= down * across:
        return
    # Neighbours share rows of ``a`` and columns of ``b``, so that L2 serves most of their loads.
    in_group = GROUP * across
    first_row = tile // in_group * GROUP
    rows_in_group = tl.minimum(down - first_row, GROUP)
    index = first_row + tile % in_group % rows_in_group
    col = (tile % in_group // rows_in_group) * COLS
    if OVER_ROWS:
        group, begin = tl.load(entry), tl.load(entry + 1)
        end = begin + tl.load(entry + 2)
        a_line, b_line = index * ROWS, col
        # dw [E, N, K]: the group's matrix begins at row group * M of the result (E * M, N).
        out_row = group * M + a_line
        out_end = group * M + M
        a_first = out_row
    else:
        # Row 0 of the table has the count of tiles.
        entry = table_ptr + (index + 1) * 4
        group, a_line, out_row, out_end = (
            tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3),
        )  # fmt: skip
        begin, end = 0, BLOCKS
        b_line = group * N + col
        a_first = a_line
    # Scales of squares begin again in each group's matrix, those of rows go on.
    b_at, b_from = b_line, b_scale
    if B.edge > 1:
        b_at, b_from = col, b_scale + group * b_group_stride
    total = tl.zeros((ROWS, COLS), tl.float32)
    for k in range(begin, end):
        if FAST:
            # total [ROWS, COLS] += a [ROWS, 128] @ b [COLS, 128].T
            total = tl.dot(a.load([a_line, k * 128]), b.load([b_line, k * 128]).T, total)
        else:
            partial = tl.dot(a.load([a_line, k * 128]), b.load([b_line, k * 128]).T)
            a_factor = scales_at(a_scale, a_line, k, A_LINES, a_stride, A, ROWS)
            b_factor = scales_at(b_from, b_at, k, B_LINES, b_stride, B, COLS)
            total += scaled(partial, a_factor, b_factor, A, B)
    i, j = out_row + tl.arange(0, ROWS), col + tl.arange(0, COLS)
    if A.edge == 0:
        factor = scale_of_sum(a_scale, group, a_first, i < out_end, A, ROWS)
        total = total * (factor[:, None] if A.is_by_line else factor)
    if B.edge == 0:
        factor = scale_of_sum(b_scale, group, group * N + col, j < N, B, COLS)
        total = total * (factor[None, :] if B.is_by_line else factor)
    pointers = out_ptr + i.to(tl.int64)[:, None] * N + j[None, :]
    inside, rounded = (i < out_end)[:, None] & (j < N)[None, :], total.to(out_ptr.dtype.element_ty)
    if added_ptr is not None:
        added = tl.load(added_ptr + i.to(tl.int64)[:, None] * N + j[None, :], mask=inside, other=0.0)
        rounded = (rounded.to(tl.float32) + added.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(pointers, rounded, mask=inside)
