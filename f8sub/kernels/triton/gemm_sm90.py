"""Products of float8 data for Hopper, ``a @ b.t()`` and those of groups: one warp loads, two warpgroups multiply.

Written in Gluon, where registers are counted: a warpgroup's 64x256 sums are computed in four quarters of 64 columns. A
quarter's partial sum of 128 elements of K takes 32 registers of a thread on the tensor core, so that two of them fit
beside the 128 of the float32 sums: one is multiplied while the other is scaled and added, and the tensor cores have
work whatever the other warpgroup does. Both operands and scales of single rows come by the tensor memory accelerator,
STAGES blocks of K ahead.

A product of matrices is that of one group, of which no table tells: ``table_ptr`` is None, and what only groups need is
not compiled. Tables of groups are ``grouped_gemm``'s.

``tests/kernels/compiled/gemms.py`` looks at what ptxas 12.8 makes of it, which hangs on three things: see ``multiply``,
``add`` and ``sum_blocks``.
"""

from f8sub.kernels.triton.triton_compat import (
    arrive_when_loaded,
    fence_async_shared,
    gl,
    gluon,
    load_block,
    load_pointers,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def place(tile, M, N, CONFIG: gl.constexpr):
    """Return first row and column of the tile with that number: down a group of tiles, then to the next column."""
    in_group = CONFIG.group * gl.cdiv(N, CONFIG.cols)
    first_row = tile // in_group * CONFIG.group
    rows_in_group = gl.minimum(gl.cdiv(M, CONFIG.rows) - first_row, CONFIG.group)
    row = (first_row + tile % in_group % rows_in_group) * CONFIG.rows
    return row, (tile % in_group // rows_in_group) * CONFIG.cols


@gluon.jit
def copy_row_scales(scale, buffer, loaded, block, first, lines, stride, ROWS: gl.constexpr):
    """Copy the scales of ROWS rows, from any first one on, by the warp's own threads, each of which arrives.

    The tensor memory accelerator takes only multiples of 16 bytes as a place in a line: anything else is an illegal
    instruction. What lies past the last row is never stored, so that its scale may be any.
    """
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 1], [1, 0])
    line = gl.minimum(first + gl.arange(0, ROWS, layout=gl.SliceLayout(0, SPREAD)), lines - 1)
    load_pointers(buffer, (scale + block.to(gl.int64) * stride + line)[None, :])
    arrive_when_loaded(loaded, increment_count=False)


@gluon.jit
def load_blocks(
    a, b, a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty, turn, a_line, b_line, begin, end,
    given, beyond, a_lines, a_stride, last,
    A: gl.constexpr, B: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Fill the stages in turn with blocks of K, each as soon as both warpgroups have read it; return the next turn.

    From ``given`` on, where it is not None, what is loaded is the block ``beyond``, which is all zeros. Where
    ``a_lines`` is not None, scales of a's rows are ``copy_row_scales``', of at most the block ``last``.
    """
    CODES: gl.constexpr = (CONFIG.rows + CONFIG.cols) * 128
    A_SCALES: gl.constexpr = CONFIG.rows * 4 if A.edge == 1 and a_lines is None else 0
    B_SCALES: gl.constexpr = CONFIG.cols * 4 if B.edge == 1 else 0
    STAGES: gl.constexpr = CONFIG.stages
    for block in range(begin, end):
        k = block
        if given is not None:
            k = gl.where(block < given, block, beyond)
        stage = turn % STAGES
        # A barrier that was never completed counts as the end of the phase before its first.
        mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
        loaded = full.index(stage)
        # The barrier opens when so many bytes have arrived in this stage.
        mbarrier.expect(loaded, CODES + A_SCALES + B_SCALES)
        # a [128, 128] and b [256, 128], 1 byte per element
        load_block(a, [a_line, k * 128], loaded, a_blocks.index(stage))
        load_block(b, [b_line, k * 128], loaded, b_blocks.index(stage))
        if A.edge == 1:
            if a_lines is None:
                load_block(a_scale, [k, a_line], loaded, a_scales.index(stage))
            else:
                known = gl.minimum(k, last)
                copy_row_scales(
                    a_scale, a_scales.index(stage), loaded, known, a_line, a_lines, a_stride, CONFIG.rows
                )
        if B.edge == 1:
            load_block(b_scale, [k, b_line], loaded, b_scales.index(stage))
        turn += 1
    return turn


@gluon.jit
def tiles_of(table_ptr, M, N, GROUPS, CONFIG: gl.constexpr, OVER_ROWS: gl.constexpr):
    """Return how many tiles there are."""
    across = gl.cdiv(N, CONFIG.cols)
    if table_ptr is None:
        return gl.cdiv(M, CONFIG.rows) * across
    elif OVER_ROWS:
        return GROUPS * gl.cdiv(M, CONFIG.rows) * across
    else:
        return gl.load(table_ptr) * across


@gluon.jit
def place_of_tile(tile, table_ptr, M, N, BLOCKS, CONFIG: gl.constexpr, OVER_ROWS: gl.constexpr):
    """Return a tile by its number: group, first rows in ``a`` and ``b``, column, blocks of K, rows of the result."""
    if table_ptr is None:
        row, col = place(tile, M, N, CONFIG)
        return 0, row, col, col, 0, BLOCKS, row, M
    elif OVER_ROWS:
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
def load_tiles(
    a, b, a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty, table_ptr, M, N, BLOCKS, GROUPS,
    A_LINES, a_stride,
    A: gl.constexpr, B: gl.constexpr, CONFIG: gl.constexpr, PASS: gl.constexpr, OVER_ROWS: gl.constexpr,
):  # fmt: skip
    """Load the blocks that every tile multiplies, filled up to whole passes with zeros."""
    turn = 0
    tiles = tiles_of(table_ptr, M, N, GROUPS, CONFIG, OVER_ROWS)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, a_line, b_line, _, begin, end, _, _ = place_of_tile(
            tile, table_ptr, M, N, BLOCKS, CONFIG, OVER_ROWS
        )
        until = begin + gl.cdiv(end - begin, PASS) * PASS
        # Past K there are zeros; past a group's rows there is the next group.
        given, beyond = None, None
        if OVER_ROWS and PASS > 1:
            given, beyond = end, BLOCKS
        lines, stride, last = None, None, None
        # Groups begin at any row of ``a``, and the accelerator loads scales from multiples of four on.
        if A.edge == 1 and table_ptr is not None and not OVER_ROWS:
            lines, stride, last = A_LINES, a_stride, BLOCKS - 1
        turn = load_blocks(
            a, b, a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty, turn, a_line, b_line,
            begin, until, given, beyond, lines, stride, last, A, B, CONFIG,
        )  # fmt: skip


@gluon.jit
def square_scale(scale, line, k, lines, BLOCKS, stride, SIDE: gl.constexpr):
    """Load the scale of squares at a row and block; 0 beyond the matrix, and for single rows, which are loaded ahead.

    1 where scales are applied to the whole sum.
    """
    if SIDE.edge == 1:
        return 0.0
    elif SIDE.edge == 0:
        return 1.0
    else:
        inside = (line < lines) & (k < BLOCKS)
        # Of signed numbers LLVM, since Triton 3.8, divides those of two blocks as one vector, and to have both it moves
        # so much to before the first that registers spill.
        block = k.to(gl.uint32) // SIDE.depth
        return gl.load(scale + line // SIDE.edge * stride + block, mask=inside, other=0.0)


@gluon.jit
def row_scales(a_scales, stage, scalar, FIRST: gl.constexpr, EDGE: gl.constexpr, SUMS: gl.constexpr):
    """Load the scales of 64 rows, (64, 1), from shared memory; ``scalar`` where one serves them all."""
    if EDGE == 1:
        return a_scales.index(stage).slice(FIRST, 64, 1).permute((1, 0)).load(SUMS)
    else:
        return scalar


@gluon.jit
def col_scales(b_scales, stage, scalar, FIRST: gl.constexpr, EDGE: gl.constexpr, SUMS: gl.constexpr):
    """Load the scales of 64 columns, (1, 64), from shared memory; ``scalar`` where one serves them all."""
    if EDGE == 1:
        return b_scales.index(stage).slice(FIRST, 64, 1).load(SUMS)
    else:
        return scalar


@gluon.jit
def multiply(a, b_block, unread, is_read, FIRST: gl.constexpr):
    """Begin the product of 64 rows of ``a`` and 64 of ``b``, (64, 64), in the registers of a sum that is not read."""
    return warpgroup_mma(
        a, b_block.slice(FIRST, 64, 0).permute((1, 0)), unread, use_acc=is_read, is_async=True
    )


@gluon.jit
def scaled_sum(total, partial, a_scale, b_scale, A: gl.constexpr, B: gl.constexpr):
    """Return a sum plus a partial one times the scales of both operands."""
    if A.edge == 1 and B.edge == 1:
        return total + (partial * a_scale) * b_scale
    elif A.edge == 0 and B.edge == 0:
        return total + partial
    else:
        return total + partial * (a_scale * b_scale)


@gluon.jit
def add(total, partial, a_scale, b_scale, A: gl.constexpr, B: gl.constexpr):
    """Return ``scaled_sum``, computed above whatever product comes next; one may be in flight meanwhile."""
    # Handed to the wait, or ptxas would compute the sum below the next product, whose registers then are others.
    return warpgroup_mma_wait(1, deps=(scaled_sum(total, partial, a_scale, b_scale, A, B),))


@gluon.jit
def store(out_ptr, added_ptr, total, row, col, M, N):
    """Store the sums of (64, 64) that lie within the matrix; 16 bytes of neighbours per thread.

    Unless its pointer is None, another matrix is added to the rounded sums, and the result is rounded.
    """
    OF_2_BYTES: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
    OF_4_BYTES: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
    # Threads that leave half of 32 bytes to another store have the memory write them twice.
    NEIGHBOURS: gl.constexpr = OF_4_BYTES if out_ptr.dtype.element_ty.primitive_bitwidth == 32 else OF_2_BYTES
    rounded = gl.convert_layout(total.to(out_ptr.dtype.element_ty), NEIGHBOURS)
    i = row + gl.arange(0, 64, layout=gl.SliceLayout(1, NEIGHBOURS))
    j = col + gl.arange(0, 64, layout=gl.SliceLayout(0, NEIGHBOURS))
    pointers = out_ptr + i.to(gl.int64)[:, None] * N + j[None, :]
    inside = (i < M)[:, None] & (j < N)[None, :]
    if added_ptr is not None:
        added = gl.load(added_ptr + i.to(gl.int64)[:, None] * N + j[None, :], mask=inside, other=0.0)
        rounded = (rounded.to(gl.float32) + added.to(gl.float32)).to(out_ptr.dtype.element_ty)
    gl.store(pointers, rounded, mask=inside)


@gluon.jit
def sum_blocks(
    a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty, turn, a_line, b_line, begin, end,
    a_lines, b_lines, a_stride, b_stride,
    A: gl.constexpr, B: gl.constexpr, CONFIG: gl.constexpr, PASS: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Sum over blocks of K for one warpgroup's 64 rows, in quarters of 64 columns; return these and the next turn.

    They are the tile's rows from its FIRST one. Each pass of the loop takes PASS blocks, which divides the stages.
    """
    STAGES: gl.constexpr = CONFIG.stages
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, 64, 32])
    zeros = gl.zeros((64, 64), gl.float32, SUMS)
    # A predicate of which the compiler knows nothing: the product gets the partial sum that was added last as an
    # accumulator that it does not read, and so has to take those registers.
    never = end < 0
    # 4 x (64, 64) float32: 128 registers of each thread
    sums_0, sums_1, sums_2, sums_3 = zeros, zeros, zeros, zeros
    for first in range(begin, end, PASS):
        base = turn % STAGES
        phase = (turn // STAGES) & 1
        free, product_3, rows, cols = zeros, zeros, 0.0, 0.0
        for u in gl.static_range(PASS):
            stage, k = base + u, first + u
            row_scalar = square_scale(a_scale, a_line + FIRST, k, a_lines, end, a_stride, A)
            left_scalar = square_scale(b_scale, b_line, k, b_lines, end, b_stride, B)
            right_scalar = left_scalar
            if B.edge > 1 and B.edge % CONFIG.cols != 0:
                right_scalar = square_scale(b_scale, b_line + 128, k, b_lines, end, b_stride, B)
            mbarrier.wait(full.index(stage), phase)
            a, b = a_blocks.index(stage).slice(FIRST, 64, 0), b_blocks.index(stage)
            if u == 0:
                # The first block of a pass: no partial sum is left whose registers it could take.
                product_0 = multiply(a, b, zeros, False, 0)
                product_1 = multiply(a, b, zeros, False, 64)
            else:
                product_0 = multiply(a, b, free, never, 0)
                free = warpgroup_mma_wait(1, deps=(product_3,))
                # The last quarter of the block before is done: nobody reads its stage any more.
                mbarrier.arrive(empty.index(stage - 1), count=1)
                sums_3 = add(sums_3, free, rows, cols, A, B)
                product_1 = multiply(a, b, free, never, 64)
            rows = row_scales(a_scales, stage, row_scalar, FIRST, A.edge, SUMS)
            cols = col_scales(b_scales, stage, left_scalar, 0, B.edge, SUMS)
            free = warpgroup_mma_wait(1, deps=(product_0,))
            sums_0 = add(sums_0, free, rows, cols, A, B)
            product_2 = multiply(a, b, free, never, 128)
            cols = col_scales(b_scales, stage, left_scalar, 64, B.edge, SUMS)
            free = warpgroup_mma_wait(1, deps=(product_1,))
            sums_1 = add(sums_1, free, rows, cols, A, B)
            product_3 = multiply(a, b, free, never, 192)
            cols = col_scales(b_scales, stage, right_scalar, 128, B.edge, SUMS)
            free = warpgroup_mma_wait(1, deps=(product_2,))
            sums_2 = add(sums_2, free, rows, cols, A, B)
            cols = col_scales(b_scales, stage, right_scalar, 192, B.edge, SUMS)
        turn += PASS
        # No product is in flight where the loop closes, or ptxas waits for every single instruction (C7514): a pass
        # takes PASS blocks of K, so that this seldom happens.
        free = warpgroup_mma_wait(0, deps=(product_3,))
        mbarrier.arrive(empty.index(base + PASS - 1), count=1)
        sums_3 = scaled_sum(sums_3, free, rows, cols, A, B)
    return sums_0, sums_1, sums_2, sums_3, turn


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
    out_ptr, added_ptr, total, a_scale, b_scale, group, a_first, row, end, col, N,
    A: gl.constexpr, B: gl.constexpr,
):  # fmt: skip
    """Store 64 columns of a warpgroup's rows, times the scales that are applied to the whole sum."""
    SUMS: gl.constexpr = total.type.layout
    total = rows_scaled(total, a_scale, group, a_first, row, end, A, SUMS)
    store(out_ptr, added_ptr, cols_scaled(total, b_scale, group, col, N, B, SUMS), row, col, end, N)


@gluon.jit
def multiply_tiles(
    out_ptr, added_ptr, a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty, table_ptr, M, N, BLOCKS,
    GROUPS, A_LINES, a_stride, b_stride, b_group_stride,
    A: gl.constexpr, B: gl.constexpr, CONFIG: gl.constexpr, PASS: gl.constexpr, OVER_ROWS: gl.constexpr,
    FAST: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Multiply one warpgroup's 64 rows of every tile, from its FIRST one."""
    turn = 0
    tiles = tiles_of(table_ptr, M, N, GROUPS, CONFIG, OVER_ROWS)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, a_line, _, col, begin, end, out_row, out_end = place_of_tile(
            tile, table_ptr, M, N, BLOCKS, CONFIG, OVER_ROWS
        )
        b_from = b_scale
        if B.edge > 1 and table_ptr is not None:
            b_from = b_scale + group * b_group_stride
        if FAST:
            sums_0, sums_1, sums_2, sums_3, turn = sum_blocks_in_place(
                a_blocks, b_blocks, full, empty, turn, begin, end, CONFIG, FIRST
            )
        else:
            sums_0, sums_1, sums_2, sums_3, turn = sum_blocks(
                a_scale, b_from, a_blocks, b_blocks, a_scales, b_scales, full, empty, turn, a_line, col, begin, end,
                M if table_ptr is None else A_LINES, N, a_stride, b_stride, A, B, CONFIG, PASS, FIRST,
            )  # fmt: skip
        # Where the scales of these 64 rows begin.
        a_first = (out_row if OVER_ROWS else a_line) + FIRST
        row = out_row + FIRST
        store_quarter(
            out_ptr, added_ptr, sums_0, a_scale, b_scale, group, a_first, row, out_end, col, N, A, B
        )
        store_quarter(
            out_ptr, added_ptr, sums_1, a_scale, b_scale, group, a_first, row, out_end, col + 64, N, A, B
        )
        store_quarter(
            out_ptr, added_ptr, sums_2, a_scale, b_scale, group, a_first, row, out_end, col + 128, N, A, B
        )
        store_quarter(
            out_ptr, added_ptr, sums_3, a_scale, b_scale, group, a_first, row, out_end, col + 192, N, A, B
        )


@gluon.jit(do_not_specialize=["M", "BLOCKS", "GROUPS", "A_LINES", "a_stride", "b_stride", "b_group_stride"])
def multiply_persistently(
    a, b, a_scale, b_scale, out_ptr, added_ptr, table_ptr, M, N, BLOCKS, GROUPS, A_LINES, a_stride, b_stride,
    b_group_stride,
    A: gl.constexpr, B: gl.constexpr, CONFIG: gl.constexpr, OVER_ROWS: gl.constexpr, FAST: gl.constexpr,
    MULTIPLIERS: gl.constexpr, LOADER: gl.constexpr,
):  # fmt: skip
    """Multiply every tile of the product, (128, 256), by as many programs as there are multiprocessors.

    ``a`` and ``b`` are descriptors of blocks of (rows, 128) and (cols, 128). Scales of rows are descriptors of blocks
    of (1, rows) and (1, cols), stored block by block of K; scales of squares are pointers to the first of rows of
    scales, ``stride`` apart; A and B are ``gemm_launch.ScaleBlock``s. MULTIPLIERS and LOADER are registers of a thread.
    Blocks beyond the last of K, up to a multiple of PASS, are zeros times zero.

    Of groups ``table_ptr`` is the table of ``grouped_gemm``, and arguments are those of its ``multiply_groups``; scales
    of ``a``'s rows by groups, which begin anywhere, are pointers. Over rows BLOCKS are those of all groups, and what
    lies past them is zeros. Of matrices ``table_ptr``, GROUPS, A_LINES and ``b_group_stride`` are None. A matrix
    ``added_ptr`` like the result is added to it, unless it is None.
    """
    ROWS: gl.constexpr = CONFIG.rows
    COLS: gl.constexpr = CONFIG.cols
    STAGES: gl.constexpr = CONFIG.stages
    # Scales of columns take so many registers that ptxas spills in a longer pass.
    WITHOUT_GROUPS: gl.constexpr = 1 if B.edge == 1 else STAGES
    OF_GROUPS: gl.constexpr = 1 if FAST or table_ptr is None else CONFIG.blocks
    PASS: gl.constexpr = WITHOUT_GROUPS if table_ptr is None else OF_GROUPS
    BY_POINTERS: gl.constexpr = A.edge == 1 and table_ptr is not None and not OVER_ROWS
    a_blocks = gl.allocate_shared_memory(a.dtype, [STAGES, ROWS, 128], a.layout)
    b_blocks = gl.allocate_shared_memory(b.dtype, [STAGES, COLS, 128], b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Where nothing is loaded ahead something has to be passed on.
    a_scales = full
    b_scales = full
    if BY_POINTERS:
        LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        a_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], LINE)
    elif A.edge == 1:
        a_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], a_scale.layout)
    if B.edge == 1:
        b_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, COLS], b_scale.layout)
    # The loader arrives, and each of its threads that copied scales.
    ARRIVALS: gl.constexpr = 33 if BY_POINTERS else 1
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=ARRIVALS)
        # both warpgroups arrive before the loader may fill it again
        mbarrier.init(empty.index(stage), count=2)
    # The barriers are to be seen by the accelerator, too, before the first load.
    fence_async_shared()
    # Two warpgroups with 64 rows each, and one warp that loads for both.
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (
                    out_ptr, added_ptr, a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty,
                    table_ptr, M, N, BLOCKS, GROUPS, A_LINES, a_stride, b_stride, b_group_stride, A, B, CONFIG, PASS,
                    OVER_ROWS, FAST,
                    0,
                ),
            ),
            (
                multiply_tiles,
                (
                    out_ptr, added_ptr, a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty,
                    table_ptr, M, N, BLOCKS, GROUPS, A_LINES, a_stride, b_stride, b_group_stride, A, B, CONFIG, PASS,
                    OVER_ROWS, FAST,
                    64,
                ),
            ),
            (
                load_tiles,
                (
                    a, b, a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty, table_ptr, M, N,
                    BLOCKS, GROUPS, A_LINES, a_stride, A, B, CONFIG, PASS, OVER_ROWS,
                ),
            ),
        ],
        [4, 1],
        [MULTIPLIERS, LOADER],
    )  # fmt: skip
