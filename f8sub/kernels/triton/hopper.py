"""Layer 1. ``a @ b.t()`` of codes with scales of blocks for Hopper: one warp loads, two warpgroups multiply.

Written in Gluon, where registers are counted: a warpgroup sums half of a tile's rows, in two parts, so that the partial
sum of 128 elements of K on the tensor core takes 64 registers a thread beside the 128 of the float32 sums. While one
warpgroup scales and adds, the other multiplies. Both operands and scales of single lines come by the tensor memory
accelerator, STAGES blocks of K ahead.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def place(tile, M, N, ROWS: gl.constexpr, COLS: gl.constexpr, GROUP: gl.constexpr):
    """First row and column of the tile with that number: down GROUP tiles, then to the next column."""
    in_group = GROUP * gl.cdiv(N, COLS)
    first_row = tile // in_group * GROUP
    rows_in_group = gl.minimum(gl.cdiv(M, ROWS) - first_row, GROUP)
    return (first_row + tile % in_group % rows_in_group) * ROWS, (tile % in_group // rows_in_group) * COLS


@gluon.jit
def load_tiles(
    a,
    b,
    a_scale,
    b_scale,
    a_blocks,
    b_blocks,
    a_scales,
    b_scales,
    full,
    empty,
    M,
    N,
    BLOCKS,
    A_EDGE: gl.constexpr,
    B_EDGE: gl.constexpr,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Fill the stages in turn, each as soon as both warpgroups are through with it."""
    CODES: gl.constexpr = (ROWS + COLS) * 128
    A_SCALES: gl.constexpr = ROWS * 4 if A_EDGE == 1 else 0
    B_SCALES: gl.constexpr = COLS * 4 if B_EDGE == 1 else 0
    turn = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, ROWS) * gl.cdiv(N, COLS), gl.num_programs(0)):
        row, col = place(tile, M, N, ROWS, COLS, GROUP)
        for k in range(BLOCKS):
            stage = turn % STAGES
            # A barrier that was never completed counts as the end of the phase before its first.
            mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
            loaded = full.index(stage)
            mbarrier.expect(loaded, CODES + A_SCALES + B_SCALES)
            tma.async_copy_global_to_shared(a, [row, k * 128], loaded, a_blocks.index(stage))
            tma.async_copy_global_to_shared(b, [col, k * 128], loaded, b_blocks.index(stage))
            if A_EDGE == 1:
                tma.async_copy_global_to_shared(a_scale, [k, row], loaded, a_scales.index(stage))
            if B_EDGE == 1:
                tma.async_copy_global_to_shared(b_scale, [k, col], loaded, b_scales.index(stage))
            turn += 1


@gluon.jit
def scaled(partial, a_scale, b_scale, A_EDGE: gl.constexpr):
    """A partial sum times the scales of both operands.

    Scales of single rows are not multiplied by the other one first: ptxas then begins the next product before it has
    added this one, and spills.
    """
    if A_EDGE == 1:
        return (partial * a_scale) * b_scale
    else:
        return partial * (a_scale * b_scale)


@gluon.jit
def store(out_ptr, total, row, col, M, N, SUMS: gl.constexpr, REGROUP: gl.constexpr):
    """The sums of (64, 128) that lie within the matrix; to REGROUP, of 16 bits eight neighbours a thread."""
    NEIGHBOURS: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
    IS_SHORT: gl.constexpr = out_ptr.dtype.element_ty.primitive_bitwidth == 16
    LAYOUT: gl.constexpr = NEIGHBOURS if REGROUP and IS_SHORT else SUMS
    rounded = gl.convert_layout(total.to(out_ptr.dtype.element_ty), LAYOUT)
    i = row + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    j = col + gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    pointers = out_ptr + i.to(gl.int64)[:, None] * N + j[None, :]
    gl.store(pointers, rounded, mask=(i < M)[:, None] & (j < N)[None, :])


@gluon.jit
def await_turn(turns, lower: gl.constexpr, TURNS: gl.constexpr, SECOND: gl.constexpr):
    """Until the other warpgroup has passed the turn on; two of them a block of K, so the phase is the part's."""
    if TURNS != "none":
        mbarrier.wait(turns.index(SECOND), lower if SECOND else lower ^ 1)


@gluon.jit
def pass_turn_issued(turns, TURNS: gl.constexpr, SECOND: gl.constexpr):
    """The other's product may queue behind this one."""
    if TURNS == "issued":
        mbarrier.arrive(turns.index(1 - SECOND), count=1)


@gluon.jit
def pass_turn_done(turns, TURNS: gl.constexpr, SECOND: gl.constexpr):
    """The other multiplies while this one adds."""
    if TURNS == "done":
        mbarrier.arrive(turns.index(1 - SECOND), count=1)


@gluon.jit
def multiply_tiles(
    out_ptr,
    a_scale,
    b_scale,
    a_blocks,
    b_blocks,
    a_scales,
    b_scales,
    full,
    empty,
    turns,
    M,
    N,
    BLOCKS,
    a_stride,
    b_stride,
    A_EDGE: gl.constexpr,
    A_DEPTH: gl.constexpr,
    B_EDGE: gl.constexpr,
    B_DEPTH: gl.constexpr,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
    SECOND: gl.constexpr,
):
    """One warpgroup's half of every tile's rows, the SECOND half or the first, in an upper and a lower part."""
    FIRST: gl.constexpr = SECOND * (ROWS // 2)
    PART: gl.constexpr = ROWS // 4
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLS, 32]
    )
    # With two squares' scales the registers do not suffice for it: ptxas spills.
    REGROUP: gl.constexpr = A_EDGE == 1 or B_EDGE == 1
    zeros = gl.zeros((PART, COLS), gl.float32, LAYOUT)
    turn = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, ROWS) * gl.cdiv(N, COLS), gl.num_programs(0)):
        row, col = place(tile, M, N, ROWS, COLS, GROUP)
        upper = gl.zeros((PART, COLS), gl.float32, LAYOUT)
        lower = gl.zeros((PART, COLS), gl.float32, LAYOUT)
        for k in range(BLOCKS):
            stage = turn % STAGES
            mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
            a = a_blocks.index(stage)
            b = b_blocks.index(stage).permute((1, 0))
            await_turn(turns, 0, TURNS, SECOND)
            partial = warpgroup_mma(a.slice(FIRST, PART, 0), b, zeros, use_acc=False, is_async=True)
            pass_turn_issued(turns, TURNS, SECOND)
            if A_EDGE == 1:
                upper_scale = a_scales.index(stage).slice(FIRST, PART, 1).permute((1, 0)).load(LAYOUT)
                lower_scale = a_scales.index(stage).slice(FIRST + PART, PART, 1).permute((1, 0)).load(LAYOUT)
            else:
                upper_scale = gl.load(a_scale + (row + FIRST) // A_EDGE * a_stride + k // A_DEPTH)
                lower_scale = upper_scale
            if B_EDGE == 1:
                col_scale = b_scales.index(stage).load(LAYOUT)
            else:
                col_scale = gl.load(b_scale + col // B_EDGE * b_stride + k // B_DEPTH)
            partial = warpgroup_mma_wait(0, deps=(partial,))
            pass_turn_done(turns, TURNS, SECOND)
            upper += scaled(partial, upper_scale, col_scale, A_EDGE)
            await_turn(turns, 1, TURNS, SECOND)
            partial = warpgroup_mma(a.slice(FIRST + PART, PART, 0), b, zeros, use_acc=False, is_async=True)
            pass_turn_issued(turns, TURNS, SECOND)
            partial = warpgroup_mma_wait(0, deps=(partial,))
            pass_turn_done(turns, TURNS, SECOND)
            mbarrier.arrive(empty.index(stage), count=1)
            lower += scaled(partial, lower_scale, col_scale, A_EDGE)
            turn += 1
        store(out_ptr, upper, row + FIRST, col, M, N, LAYOUT, REGROUP)
        store(out_ptr, lower, row + FIRST + PART, col, M, N, LAYOUT, REGROUP)


@gluon.jit(do_not_specialize=["M", "BLOCKS", "a_stride", "b_stride"])
def multiply_persistently(
    a,
    b,
    a_scale,
    b_scale,
    out_ptr,
    M,
    N,
    BLOCKS,
    a_stride,
    b_stride,
    A_EDGE: gl.constexpr,
    A_DEPTH: gl.constexpr,
    B_EDGE: gl.constexpr,
    B_DEPTH: gl.constexpr,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
    MULTIPLIERS: gl.constexpr,
    LOADER: gl.constexpr,
):
    """Every (ROWS, COLS) tile of the product, as many programs as there are multiprocessors.

    ``a`` and ``b`` are descriptors of blocks of (ROWS, 128) and (COLS, 128). Scales of lines (EDGE 1) are descriptors
    of blocks of (1, ROWS) and (1, COLS), stored block by block of K; of squares of EDGE lines pointers to the first of
    rows of scales, ``stride`` apart, each of DEPTH blocks. TURNS says when a warpgroup's
    product may begin: at once ("none"), or when the other's last one was "issued" or is "done". MULTIPLIERS and LOADER
    are registers of a thread.
    """
    a_blocks = gl.allocate_shared_memory(a.dtype, [STAGES, ROWS, 128], a.layout)
    b_blocks = gl.allocate_shared_memory(b.dtype, [STAGES, COLS, 128], b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    # Of squares there is nothing to load ahead; something has to be passed on.
    a_scales = full
    b_scales = full
    if A_EDGE == 1:
        a_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], a_scale.layout)
    if B_EDGE == 1:
        b_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, COLS], b_scale.layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    for second in gl.static_range(2):
        mbarrier.init(turns.index(second), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (
                    out_ptr, a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty, turns, M, N, BLOCKS,
                    a_stride, b_stride, A_EDGE, A_DEPTH, B_EDGE, B_DEPTH, ROWS, COLS, GROUP, STAGES, TURNS, 0,
                ),
            ),
            (
                multiply_tiles,
                (
                    out_ptr, a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty, turns, M, N, BLOCKS,
                    a_stride, b_stride, A_EDGE, A_DEPTH, B_EDGE, B_DEPTH, ROWS, COLS, GROUP, STAGES, TURNS, 1,
                ),
            ),
            (
                load_tiles,
                (
                    a, b, a_scale, b_scale, a_blocks, b_blocks, a_scales, b_scales, full, empty, M, N, BLOCKS,
                    A_EDGE, B_EDGE, ROWS, COLS, GROUP, STAGES,
                ),
            ),
        ],
        [4, 1],
        [MULTIPLIERS, LOADER],
    )  # fmt: skip
