"""``a @ b.t()`` of float8 data with scales of blocks for Hopper: one warp loads, two warpgroups multiply.

Written in Gluon, where registers are counted: a warpgroup's 64x256 sums are computed in four quarters of 64 columns. A
quarter's partial sum of 128 elements of K takes 32 registers of a thread on the tensor core, so that two of them fit
beside the 128 of the float32 sums: one is multiplied while the other is scaled and added, and the tensor cores have
work whatever the other warpgroup does. Both operands and scales of single rows come by the tensor memory accelerator,
STAGES blocks of K ahead.

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
def load_tiles(
    a, b, a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty, M, N, BLOCKS,
    A: gl.constexpr, B: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Load the blocks that every tile multiplies."""
    turn = 0
    for tile in range(
        gl.program_id(0), gl.cdiv(M, CONFIG.rows) * gl.cdiv(N, CONFIG.cols), gl.num_programs(0)
    ):
        row, col = place(tile, M, N, CONFIG)
        turn = load_blocks(
            a, b, a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty, turn, row, col, 0,
            BLOCKS, None, None, None, None, None, A, B, CONFIG,
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
def store(out_ptr, total, row, col, M, N):
    """Store the sums of (64, 64) that lie within the matrix; eight neighbours per thread."""
    NEIGHBOURS: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
    rounded = gl.convert_layout(total.to(out_ptr.dtype.element_ty), NEIGHBOURS)
    i = row + gl.arange(0, 64, layout=gl.SliceLayout(1, NEIGHBOURS))
    j = col + gl.arange(0, 64, layout=gl.SliceLayout(0, NEIGHBOURS))
    pointers = out_ptr + i.to(gl.int64)[:, None] * N + j[None, :]
    gl.store(pointers, rounded, mask=(i < M)[:, None] & (j < N)[None, :])


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
def multiply_tiles(
    out_ptr, a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty, M, N, BLOCKS, a_stride,
    b_stride,
    A: gl.constexpr, B: gl.constexpr, CONFIG: gl.constexpr, PASS: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Multiply one warpgroup's 64 rows of every tile, from its FIRST one."""
    turn = 0
    for tile in range(
        gl.program_id(0), gl.cdiv(M, CONFIG.rows) * gl.cdiv(N, CONFIG.cols), gl.num_programs(0)
    ):
        row, col = place(tile, M, N, CONFIG)
        sums_0, sums_1, sums_2, sums_3, turn = sum_blocks(
            a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty, turn, row, col, 0, BLOCKS,
            M, N, a_stride, b_stride, A, B, CONFIG, PASS, FIRST,
        )  # fmt: skip
        store(out_ptr, sums_0, row + FIRST, col, M, N)
        store(out_ptr, sums_1, row + FIRST, col + 64, M, N)
        store(out_ptr, sums_2, row + FIRST, col + 128, M, N)
        store(out_ptr, sums_3, row + FIRST, col + 192, M, N)


@gluon.jit(do_not_specialize=["M", "BLOCKS", "a_stride", "b_stride"])
def multiply_persistently(
    a, b, a_scale, b_scale, out_ptr, M, N, BLOCKS, a_stride, b_stride,
    A: gl.constexpr, B: gl.constexpr, CONFIG: gl.constexpr, MULTIPLIERS: gl.constexpr, LOADER: gl.constexpr,
):  # fmt: skip
    """Multiply every tile of the product, (128, 256), by as many programs as there are multiprocessors.

    ``a`` and ``b`` are descriptors of blocks of (rows, 128) and (cols, 128). Scales of rows are descriptors of blocks
    of (1, rows) and (1, cols), stored block by block of K; scales of squares are pointers to the first of rows of
    scales, ``stride`` apart; A and B are ``gemm_launch.ScaleBlock``s. MULTIPLIERS and LOADER are registers of a thread.
    Blocks beyond the last of K, up to a multiple of PASS, are zeros times zero.
    """
    ROWS: gl.constexpr = CONFIG.rows
    COLS: gl.constexpr = CONFIG.cols
    STAGES: gl.constexpr = CONFIG.stages
    # Scales of columns take so many registers that ptxas spills in a longer pass.
    PASS: gl.constexpr = 1 if B.edge == 1 else STAGES
    a_blocks = gl.allocate_shared_memory(a.dtype, [STAGES, ROWS, 128], a.layout)
    b_blocks = gl.allocate_shared_memory(b.dtype, [STAGES, COLS, 128], b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # For squares nothing is loaded ahead; something has to be passed on.
    a_scales = full
    b_scales = full
    if A.edge == 1:
        a_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], a_scale.layout)
    if B.edge == 1:
        b_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, COLS], b_scale.layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
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
                    out_ptr, a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty, M, N, BLOCKS,
                    a_stride, b_stride, A, B, CONFIG, PASS, 0,
                ),
            ),
            (
                multiply_tiles,
                (
                    out_ptr, a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty, M, N, BLOCKS,
                    a_stride, b_stride, A, B, CONFIG, PASS, 64,
                ),
            ),
            (
                load_tiles,
                (
                    a, b, a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty, M, N,
                    gl.cdiv(BLOCKS, PASS) * PASS, A, B, CONFIG,
                ),
            ),
        ],
        [4, 1],
        [MULTIPLIERS, LOADER],
    )  # fmt: skip
