"""``a @ b.t()`` of codes with scales of blocks, in Triton: tiles of any size, K in parts for few rows.

Each partial sum of 128 elements of K is scaled and added in float32, see ``reference.PROMOTION``.
"""

import triton
import triton.language as tl


@triton.jit
def scales_at(scale, first, k, size, stride, EDGE: tl.constexpr, DEPTH: tl.constexpr, LINES: tl.constexpr):
    """Scales of LINES lines from ``first`` on in block ``k`` of K: one a line, or one of squares of EDGE lines.

    Each is of DEPTH blocks. Of lines those of one block lie side by side, of squares those of one row of them; what
    follows is ``stride`` apart.
    """
    if EDGE == 1:
        lines = first + tl.arange(0, LINES)
        return tl.load(scale + k // DEPTH * stride + lines, mask=lines < size, other=0.0)
    else:
        return tl.load(scale + (first // EDGE) * stride + k // DEPTH)


@triton.jit
def scaled(partial, a_scale, b_scale, A_EDGE: tl.constexpr, B_EDGE: tl.constexpr):
    """A partial sum times the scales of both operands."""
    if A_EDGE == 1 and B_EDGE == 1:
        return (partial * a_scale[:, None]) * b_scale[None, :]
    elif A_EDGE == 1:
        return partial * (a_scale * b_scale)[:, None]
    elif B_EDGE == 1:
        return partial * (a_scale * b_scale)[None, :]
    else:
        return partial * (a_scale * b_scale)


@triton.jit(do_not_specialize=["M", "BLOCKS", "a_stride", "b_stride"])
def multiply(
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
    A_EDGE: tl.constexpr,
    A_DEPTH: tl.constexpr,
    B_EDGE: tl.constexpr,
    B_DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One (ROWS, COLS) tile a program, of all of K or of one of PARTS of it; ``out_ptr`` then has a matrix a part.

    ``a`` and ``b`` are descriptors of blocks of (ROWS, 128) and (COLS, 128): what lies beyond the matrix reads as 0.
    """
    part = tl.program_id(0) % PARTS
    tile = tl.program_id(0) // PARTS
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
    a_factor = scales_at(a_scale, row, first, M, a_stride, A_EDGE, A_DEPTH, ROWS)
    b_factor = scales_at(b_scale, col, first, N, b_stride, B_EDGE, B_DEPTH, COLS)
    for k in range(begin, end):
        partial = tl.dot(a.load([row, k * 128]), b.load([col, k * 128]).T)
        # The next block's scales are on their way while this one is multiplied.
        following = tl.minimum(k + 1, BLOCKS - 1)
        next_a_factor = scales_at(a_scale, row, following, M, a_stride, A_EDGE, A_DEPTH, ROWS)
        next_b_factor = scales_at(b_scale, col, following, N, b_stride, B_EDGE, B_DEPTH, COLS)
        total += scaled(partial, a_factor, b_factor, A_EDGE, B_EDGE)
        a_factor, b_factor = next_a_factor, next_b_factor
    i, j = row + tl.arange(0, ROWS), col + tl.arange(0, COLS)
    pointers = out_ptr + part.to(tl.int64) * M * N + i.to(tl.int64)[:, None] * N + j[None, :]
    tl.store(pointers, total.to(out_ptr.dtype.element_ty), mask=(i < M)[:, None] & (j < N)[None, :])


@triton.jit(do_not_specialize=["SIZE"])
def add_parts(parts_ptr, out_ptr, SIZE, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of PARTS matrices of SIZE elements, always in the same order."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + part * SIZE + i, mask=i < SIZE, other=0.0)
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=i < SIZE)
