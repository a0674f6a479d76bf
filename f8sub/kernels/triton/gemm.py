"""``a @ b.t()`` of float8 data with scales of blocks, in Triton: tiles of any size, K in parts for few rows.

Each partial sum of 128 elements of K is scaled and added in float32, see ``reference.PROMOTION``.
"""

import triton
import triton.language as tl


@triton.jit
def scales_at(scale, first, k, size, stride, SIDE: tl.constexpr, LINES: tl.constexpr):
    """Load scales of LINES rows or columns from ``first`` on in block ``k`` of K: one each, or one scale of squares.

    Scales of rows lie side by side for one block, scales of squares for one row of squares; what follows is ``stride``
    apart. 1 where scales are applied to the whole sum.
    """
    if SIDE.edge == 0:
        return 1.0
    elif SIDE.edge == 1:
        lines = first + tl.arange(0, LINES)
        return tl.load(scale + k // SIDE.depth * stride + lines, mask=lines < size, other=0.0)
    else:
        return tl.load(scale + (first // SIDE.edge) * stride + k // SIDE.depth)


@triton.jit
def scaled(partial, a_scale, b_scale, A: tl.constexpr, B: tl.constexpr):
    """Return a partial sum, (ROWS, COLS), times the scales of both operands."""
    if A.edge == 1 and B.edge == 1:
        # (ROWS, 1) and (1, COLS): both scales change within the tile
        return (partial * a_scale[:, None]) * b_scale[None, :]
    elif A.edge == 1:
        # one product of scales per row, not two per element
        return partial * (a_scale * b_scale)[:, None]
    elif B.edge == 1:
        return partial * (a_scale * b_scale)[None, :]
    else:
        return partial * (a_scale * b_scale)


@triton.jit(do_not_specialize=["M", "BLOCKS", "a_stride", "b_stride"])
def multiply(
    a, b, a_scale, b_scale, out_ptr, M, N, BLOCKS, a_stride, b_stride,
    A: tl.constexpr, B: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Multiply one tile per program, over all of K or one of its parts; ``out_ptr`` then has a matrix per part.

    ``a`` and ``b`` are descriptors of blocks of (rows, 128) and (cols, 128): what lies beyond the matrix reads as 0. A
    and B are ``gemm_launch.ScaleBlock``s.
    """
    ROWS: tl.constexpr = CONFIG.rows
    COLS: tl.constexpr = CONFIG.cols
    GROUP: tl.constexpr = CONFIG.group
    PARTS: tl.constexpr = CONFIG.parts
    part = tl.program_id(0) % PARTS
    tile = tl.program_id(0) // PARTS
    # Down GROUP tiles of one column, then the next column: programs that run together share blocks of ``b`` in L2.
    in_group = GROUP * tl.cdiv(N, COLS)
    first_row = tile // in_group * GROUP
    rows_in_group = tl.minimum(tl.cdiv(M, ROWS) - first_row, GROUP)
    row = (first_row + tile % in_group % rows_in_group) * ROWS
    col = (tile % in_group // rows_in_group) * COLS
    blocks = tl.cdiv(BLOCKS, PARTS)
    begin = part * blocks
    end = tl.minimum(begin + blocks, BLOCKS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    # The last parts may have no blocks.
    first = tl.minimum(begin, BLOCKS - 1)
    a_factor = scales_at(a_scale, row, first, M, a_stride, A, ROWS)
    b_factor = scales_at(b_scale, col, first, N, b_stride, B, COLS)
    for k in range(begin, end):
        # partial [ROWS, COLS] = a [ROWS, 128] @ b [COLS, 128].T
        partial = tl.dot(a.load([row, k * 128]), b.load([col, k * 128]).T)
        # The next block's scales are on their way while this one is multiplied.
        following = tl.minimum(k + 1, BLOCKS - 1)
        next_a_factor = scales_at(a_scale, row, following, M, a_stride, A, ROWS)
        next_b_factor = scales_at(b_scale, col, following, N, b_stride, B, COLS)
        total += scaled(partial, a_factor, b_factor, A, B)
        a_factor, b_factor = next_a_factor, next_b_factor
    i, j = row + tl.arange(0, ROWS), col + tl.arange(0, COLS)
    # [PARTS, M, N], or [M, N]
    pointers = out_ptr + part.to(tl.int64) * M * N + i.to(tl.int64)[:, None] * N + j[None, :]
    tl.store(pointers, total.to(out_ptr.dtype.element_ty), mask=(i < M)[:, None] & (j < N)[None, :])


@triton.jit(do_not_specialize=["SIZE"])
def add_parts(parts_ptr, out_ptr, SIZE, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Add PARTS matrices of SIZE elements, float32, always in the same order."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + part * SIZE + i, mask=i < SIZE, other=0.0)
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=i < SIZE)
