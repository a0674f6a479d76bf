"""Grouped products for Hopper, in Gluon: ``gemm_sm90``'s loader and multipliers, over the tiles of a table."""

from f8sub.kernels.triton.gemm_sm90 import (
    load_blocks,
    place,
    store,
    sum_blocks,
)
from f8sub.kernels.triton.triton_compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def tiles_of(table_ptr, M, N, GROUPS, CONFIG: gl.constexpr, OVER_ROWS: gl.constexpr):
    """Return how many tiles there are."""
    across = gl.cdiv(N, CONFIG.cols)
    if OVER_ROWS:
        return GROUPS * gl.cdiv(M, CONFIG.rows) * across
    else:
        return gl.load(table_ptr) * across


@gluon.jit
def place_in_groups(tile, table_ptr, M, N, BLOCKS, CONFIG: gl.constexpr, OVER_ROWS: gl.constexpr):
    """Return a tile by its number: group, first rows in ``a`` and ``b``, column, blocks of K, rows of the result."""
    if OVER_ROWS:
        in_group = gl.cdiv(M, CONFIG.rows) * gl.cdiv(N, CONFIG.cols)
        entry = table_ptr + tile // in_group * 4
        row, col = place(tile % in_group, M, N, CONFIG)
        group, begin = gl.load(entry), gl.load(entry + 1)
        end = begin + gl.load(entry + 2)
        return group, row, col, col, begin, end, group * M + row, group * M + M
    else:
        row, col = place(tile, gl.load(table_ptr) * CONFIG.rows, N, CONFIG)
        entry = table_ptr + (row // CONFIG.rows + 1) * 4
        group, a_line = gl.load(entry), gl.load(entry + 1)
        out_row, out_end = gl.load(entry + 2), gl.load(entry + 3)
        return group, a_line, group * N + col, col, 0, BLOCKS, out_row, out_end


@gluon.jit
def load_groups(
    a, b, a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty, table_ptr, M, N, BLOCKS, GROUPS,
    A_LINES, a_stride,
    A: gl.constexpr, B: gl.constexpr, CONFIG: gl.constexpr, PASS: gl.constexpr, OVER_ROWS: gl.constexpr,
):  # fmt: skip
    """Load the blocks that every tile multiplies, filled up to whole passes with zeros."""
    turn = 0
    tiles = tiles_of(table_ptr, M, N, GROUPS, CONFIG, OVER_ROWS)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, a_line, b_line, _, begin, end, _, _ = place_in_groups(
            tile, table_ptr, M, N, BLOCKS, CONFIG, OVER_ROWS
        )
        until = begin + gl.cdiv(end - begin, PASS) * PASS
        # Past K there are zeros; past a group's rows there is the next group.
        given, beyond = None, None
        if OVER_ROWS and PASS > 1:
            given, beyond = end, BLOCKS
        lines, stride, last = None, None, None
        if A.edge == 1 and not OVER_ROWS:
            lines, stride, last = A_LINES, a_stride, BLOCKS - 1
        turn = load_blocks(
            a, b, a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty, turn, a_line, b_line,
            begin, until, given, beyond, lines, stride, last, A, B, CONFIG,
        )  # fmt: skip


@gluon.jit
def halves(sums, COLS: gl.constexpr):
    """Return the left and the right half of (64, COLS)."""
    return sums.reshape((64, 2, COLS // 2)).permute((0, 2, 1)).split()


@gluon.jit
def sum_blocks_in_place(
    a_blocks, b_blocks, full, empty, turn, begin, end, CONFIG: gl.constexpr, FIRST: gl.constexpr
):
    """Sum as ``gemm_sm90.sum_blocks``, but in the tensor cores' accumulators: fast accumulation."""
    STAGES: gl.constexpr = CONFIG.stages
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, 256, 32])
    sums = gl.zeros((64, 256), gl.float32, SUMS)
    for k in range(begin, end):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
        a, b = a_blocks.index(stage).slice(FIRST, 64, 0), b_blocks.index(stage).permute((1, 0))
        # sums [64, 256] += a [64, 128] @ b [256, 128].T
        sums = warpgroup_mma(a, b, sums, is_async=True)
        # The product before this one is made, and its stage free.
        sums = warpgroup_mma_wait(1, deps=(sums,))
        mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=k > begin)
        turn += 1
    sums = warpgroup_mma_wait(0, deps=(sums,))
    mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=end > begin)
    left, right = halves(sums, 256)
    # In quarters of 64 columns, as ``sum_blocks`` returns them.
    sums_0, sums_1 = halves(left, 128)
    sums_2, sums_3 = halves(right, 128)
    return sums_0, sums_1, sums_2, sums_3, turn


@gluon.jit
def rows_scaled(total, scale, group, first, row, end, SIDE: gl.constexpr, SUMS: gl.constexpr):
    """Return a sum times the scales of its 64 rows, or of its group, where those are applied to the whole sum."""
    if SIDE.edge != 0:
        return total
    elif SIDE.is_by_line:
        i = gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS))
        return total * gl.load(scale + first + i, mask=row + i < end, other=0.0)[:, None]
    else:
        return total * gl.load(scale + group)


@gluon.jit
def cols_scaled(total, scale, group, col, N, SIDE: gl.constexpr, SUMS: gl.constexpr):
    """Return a sum times the scales of its 64 columns, or of its group, where those are applied to the whole sum."""
    if SIDE.edge != 0:
        return total
    elif SIDE.is_by_line:
        j = col + gl.arange(0, 64, layout=gl.SliceLayout(0, SUMS))
        return total * gl.load(scale + group * N + j, mask=j < N, other=0.0)[None, :]
    else:
        return total * gl.load(scale + group)


@gluon.jit
def store_quarter(
    out_ptr, total, a_scale, b_scale, group, a_first, row, end, col, N,
    A: gl.constexpr, B: gl.constexpr,
):  # fmt: skip
    """Store 64 columns of a warpgroup's rows, times the scales that are applied to the whole sum."""
    SUMS: gl.constexpr = total.type.layout
    total = rows_scaled(total, a_scale, group, a_first, row, end, A, SUMS)
    store(out_ptr, cols_scaled(total, b_scale, group, col, N, B, SUMS), row, col, end, N)


@gluon.jit
def multiply_groups(
    out_ptr, a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty, table_ptr, M, N, BLOCKS, GROUPS,
    A_LINES, a_stride, b_stride, b_group_stride,
    A: gl.constexpr, B: gl.constexpr, CONFIG: gl.constexpr, PASS: gl.constexpr, OVER_ROWS: gl.constexpr,
    FAST: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Multiply one warpgroup's 64 rows of every tile, from its FIRST one."""
    turn = 0
    tiles = tiles_of(table_ptr, M, N, GROUPS, CONFIG, OVER_ROWS)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, a_line, _, col, begin, end, out_row, out_end = place_in_groups(
            tile, table_ptr, M, N, BLOCKS, CONFIG, OVER_ROWS
        )
        b_from = b_scale
        if B.edge > 1:
            b_from = b_scale + group * b_group_stride
        if FAST:
            sums_0, sums_1, sums_2, sums_3, turn = sum_blocks_in_place(
                a_blocks, b_blocks, full, empty, turn, begin, end, CONFIG, FIRST
            )
        else:
            sums_0, sums_1, sums_2, sums_3, turn = sum_blocks(
                a_scale, b_from, a_blocks, b_blocks, a_scales, b_scales, full, empty, turn, a_line, col, begin, end,
                A_LINES, N, a_stride, b_stride, A, B, CONFIG, PASS, FIRST,
            )  # fmt: skip
        # Where the scales of these 64 rows begin.
        a_first = (out_row if OVER_ROWS else a_line) + FIRST
        row = out_row + FIRST
        store_quarter(out_ptr, sums_0, a_scale, b_scale, group, a_first, row, out_end, col, N, A, B)
        store_quarter(out_ptr, sums_1, a_scale, b_scale, group, a_first, row, out_end, col + 64, N, A, B)
        store_quarter(out_ptr, sums_2, a_scale, b_scale, group, a_first, row, out_end, col + 128, N, A, B)
        store_quarter(out_ptr, sums_3, a_scale, b_scale, group, a_first, row, out_end, col + 192, N, A, B)


@gluon.jit(do_not_specialize=["M", "BLOCKS", "GROUPS", "A_LINES", "a_stride", "b_stride", "b_group_stride"])
def multiply_groups_persistently(
    a, b, a_scale, b_scale, out_ptr, table_ptr, M, N, BLOCKS, GROUPS, A_LINES, a_stride, b_stride, b_group_stride,
    A: gl.constexpr, B: gl.constexpr, CONFIG: gl.constexpr, OVER_ROWS: gl.constexpr, FAST: gl.constexpr,
    MULTIPLIERS: gl.constexpr, LOADER: gl.constexpr,
):  # fmt: skip
    """Multiply every tile of the product, (128, 256), by as many programs as there are multiprocessors.

    ``table_ptr`` is the table of ``grouped_gemm``, and arguments are those of its ``multiply_groups``, but of the
    persistent kind: scales of rows for each block of K are descriptors, see ``gemm_sm90.multiply_persistently``; those
    of ``a`` by rows, where groups begin anywhere, are pointers. Over rows BLOCKS are those of all groups, and what lies
    past them is zeros.
    """
    ROWS: gl.constexpr = CONFIG.rows
    COLS: gl.constexpr = CONFIG.cols
    STAGES: gl.constexpr = CONFIG.stages
    PASS: gl.constexpr = 1 if FAST else CONFIG.blocks
    a_blocks = gl.allocate_shared_memory(a.dtype, [STAGES, ROWS, 128], a.layout)
    b_blocks = gl.allocate_shared_memory(b.dtype, [STAGES, COLS, 128], b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Where nothing is loaded ahead something has to be passed on.
    a_scales = full
    b_scales = full
    if A.edge == 1 and OVER_ROWS:
        a_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], a_scale.layout)
    elif A.edge == 1:
        LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        a_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], LINE)
    if B.edge == 1:
        b_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, COLS], b_scale.layout)
    # The loader arrives, and each of its threads that copied scales.
    ARRIVALS: gl.constexpr = 33 if A.edge == 1 and not OVER_ROWS else 1
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=ARRIVALS)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                multiply_groups,
                (
                    out_ptr, a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty, table_ptr, M, N,
                    BLOCKS, GROUPS, A_LINES, a_stride, b_stride, b_group_stride, A, B, CONFIG, PASS, OVER_ROWS, FAST,
                    0,
                ),
            ),
            (
                multiply_groups,
                (
                    out_ptr, a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty, table_ptr, M, N,
                    BLOCKS, GROUPS, A_LINES, a_stride, b_stride, b_group_stride, A, B, CONFIG, PASS, OVER_ROWS, FAST,
                    64,
                ),
            ),
            (
                load_groups,
                (
                    a, b, a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty, table_ptr, M, N,
                    BLOCKS, GROUPS, A_LINES, a_stride, A, B, CONFIG, PASS, OVER_ROWS,
                ),
            ),
        ],
        [4, 1],
        [MULTIPLIERS, LOADER],
    )  # fmt: skip
