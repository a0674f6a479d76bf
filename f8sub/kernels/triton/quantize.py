"""Kernels that quantize a matrix x (M, N) to the rowwise operand (M, N), the columnwise operand (N, M), or both.

With scales of a matrix, of rows or of columns the amaxes come first, then the data of both usages. With scales of
blocks one kernel computes amax, scale and data. An amax is kept as the bits of a float32 that is not negative: those
order as integers do, for which there is an atomic maximum; the bits of NaN come last, after those of infinity.
"""

import triton
import triton.language as tl

from f8sub.kernels.triton.quantize_grouped import group_of, is_past, lines_of, store_lines, store_vectors
from f8sub.kernels.triton.quantize_grouped import load_halves as load_halves_of_lines
from f8sub.kernels.triton.tile_ops import (
    EXPONENT_BITS,
    amax_bits,
    codes,
    finite_or_nan,
    inverse,
    larger_magnitude,
    load,
    load_finite_halves,
    load_halves,
    magnitude_bits,
    moved,
    place,
    place_in_stack,
    scale_from_amax,
    scale_from_prior,
    scaled,
    store,
    store_columns,
    store_rows,
    store_scales_of_square,
    store_with_one,
    store_zero_columns,
)


@triton.jit
def amax_of_matrix(x_ptr, amax_ptr, prior_ptr, SIZE, STRIDE, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Take the atomic maximum of the finite elements; skipped where ``prior_ptr`` points to a scale that is not 0.

    Of each expert's matrix, (experts,), int32, where STRIDE is not None: they have SIZE elements each, and begin STRIDE
    after the one before.
    """
    needed = prior_ptr is None
    if prior_ptr is not None:
        # On the device: the host does not know whether a delayed scale was computed yet,
        # and does not wait to learn it.
        needed = tl.load(prior_ptr) == 0.0
    if needed:
        if STRIDE is None:
            start = tl.program_id(0).to(tl.int64) * BLOCK
        else:
            parts = tl.cdiv(SIZE, BLOCK)
            expert, start = tl.program_id(0) // parts, tl.program_id(0) % parts * BLOCK
            x_ptr += expert.to(tl.int64) * STRIDE
            amax_ptr += expert
        offsets = tl.arange(0, BLOCK)
        x = load(x_ptr + start + offsets, inside=offsets < SIZE - start, WHOLE=WHOLE, KEEP="")
        # As integers: NaN and infinity are then one comparison, and the maximum an atomic.
        bits = magnitude_bits(x.to(tl.float32))
        tl.atomic_max(amax_ptr, tl.max(tl.where(bits < EXPONENT_BITS, bits, 0)), sem="relaxed")


@triton.jit
def cast_with_one(
    x_ptr, amax_ptr, prior_ptr, largest_ptr, row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr, M, N,
    CAST: tl.constexpr, HEADROOM: tl.constexpr, COVERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Cast with one scale, for each usage whose pointer is not None, and store the scale's inverse.

    The scale is computed from the amax, or is the prior scale where ``prior_ptr`` is not None; if ``amax_ptr`` is None,
    the prior scale is known not to be 0. With a prior scale ``largest`` becomes the largest magnitude of all elements.
    """
    # The last tile first: what an amax was taken from last is still in L2.
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    at = place(index, M, N, TILE.ROWS, TILE.COLS)
    # The cast is the last to read x here, so that its lines may leave L2 first.
    even, odd = load_halves(x_ptr, at, TILE, "evict_first")
    if prior_ptr is None:
        scale = scale_from_amax(tl.load(amax_ptr), CAST)
    else:
        scale = tl.load(prior_ptr)
        if amax_ptr is not None:
            scale = scale_from_prior(scale, tl.load(amax_ptr), CAST, HEADROOM, COVERS)
        # Before infinity becomes NaN: ``largest`` tells both, for the amax history.
        bits = tl.maximum(magnitude_bits(even), magnitude_bits(odd))
        tl.atomic_max(largest_ptr, tl.max(bits), sem="relaxed")
    even, odd = finite_or_nan(even), finite_or_nan(odd)
    # Elements may exceed what a prior scale maps to the format's range.
    SATURATE: tl.constexpr = prior_ptr is not None
    store_with_one(row_ptr, col_ptr, even, odd, scale, at, CAST, TILE, SATURATE)
    # A prior scale need not keep to the format's rule.
    scale_inv = inverse(scale, CAST.POWER_OF_2 and prior_ptr is None)
    if row_ptr is not None:
        tl.store(row_scale_inv_ptr, scale_inv, mask=index == 0)
    if col_ptr is not None:
        tl.store(col_scale_inv_ptr, scale_inv, mask=index == 0)


@triton.jit
def cast_experts(
    x_ptr, amax_ptr, row_ptr, row_scale_inv_ptr, SIZE, STRIDE,
    CAST: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Cast to rowwise data with one scale per expert, of its amax."""
    parts = tl.cdiv(SIZE, BLOCK)
    # The last part first, as in ``cast_with_one``.
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    expert, start = index // parts, index % parts * BLOCK
    offsets = tl.arange(0, BLOCK)
    pointers = x_ptr + expert.to(tl.int64) * STRIDE + start + offsets
    x = load(pointers, inside=offsets < SIZE - start, WHOLE=WHOLE, KEEP="evict_first")
    scale = scale_from_amax(tl.load(amax_ptr + expert), CAST)
    made = codes(scaled(finite_or_nan(x.to(tl.float32)), scale, CAST, False), CAST.CODES)
    store(row_ptr + expert.to(tl.int64) * SIZE + start + offsets, made, offsets < SIZE - start, WHOLE)
    tl.store(row_scale_inv_ptr + expert, inverse(scale, CAST.POWER_OF_2), mask=start == 0)


@triton.jit
def stage_amax(amax_ptr, staged_ptr, met_ptr):
    """Take one amax into a staged one: ``cuda.stage``."""
    amax, staged, met = tl.load(amax_ptr), tl.load(staged_ptr), tl.load(met_ptr)
    is_finite = magnitude_bits(amax) < EXPONENT_BITS
    # A running maximum: micro-batches and recomputed forwards come in any number.
    tl.store(staged_ptr, tl.where(is_finite, tl.maximum(staged, amax), staged))
    tl.store(met_ptr, tl.where(is_finite, met, 1.0))


@triton.jit
def amax_of_lines(
    x_ptr, row_amax_ptr, col_amax_ptr, M, N,
    STEPS: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Take atomic maxima of the finite elements of each row and of each column, unless their pointer is None.

    They are (M,) and (N,), int32. A program goes down STEPS tiles of the same columns, whose amaxes it reduces once.
    """
    first = place(tl.program_id(0), M, N, TILE.ROWS * STEPS, TILE.COLS)
    HALF: tl.constexpr = TILE.ROWS // 2
    COLS: tl.constexpr = TILE.COLS
    largest = tl.zeros((HALF, COLS), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        at = moved(first, step * TILE.ROWS, 0)
        even, odd = load_finite_halves(x_ptr, at, TILE, "")
        # Rows end with this tile, columns go on with the next: theirs are reduced once at the end.
        if row_amax_ptr is not None:
            i = at.row + 2 * tl.arange(0, TILE.ROWS // 2)
            even_bits = amax_bits(tl.max(tl.abs(even), 1))
            tl.atomic_max(row_amax_ptr + i, even_bits, mask=i < M, sem="relaxed")
            odd_bits = amax_bits(tl.max(tl.abs(odd), 1))
            tl.atomic_max(row_amax_ptr + i + 1, odd_bits, mask=i + 1 < M, sem="relaxed")
        if col_amax_ptr is not None:
            largest = tl.maximum(largest, larger_magnitude(even, odd))
    if col_amax_ptr is not None:
        j = first.col + tl.arange(0, TILE.COLS)
        tl.atomic_max(col_amax_ptr + j, amax_bits(tl.max(largest, 0)), mask=j < N, sem="relaxed")


@triton.jit
def cast_with_lines(
    x_ptr, index_ptr, factor_ptr, strips_ptr, row_amax_ptr, row_ptr, row_scale_inv_ptr, col_amax_ptr, col_ptr,
    col_scale_inv_ptr, COUNT, STRIPS, M, N, CAST: tl.constexpr, EDGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Cast each usage whose pointer is not None, with scales of the amaxes of the rows and of the columns.

    Of COUNT groups M are rows as laid out, see ``quantize_grouped``, and columns have an amax in each, (COUNT, N). Of a
    matrix ``strips_ptr`` is None.
    """
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    at = place(index, M, N, TILE.ROWS, TILE.COLS)
    ROWS: tl.constexpr = TILE.ROWS
    j = at.col + tl.arange(0, TILE.COLS)
    if strips_ptr is not None:
        # By the programs of one column of tiles: an empty group has no tile, and its scales are stored all the same.
        for one in range(at.row // ROWS, COUNT, tl.cdiv(M, ROWS)):
            of_group = one * N + j
            scale = scale_from_amax(tl.load(col_amax_ptr + of_group, mask=j < N, other=0.0), CAST)
            tl.store(col_scale_inv_ptr + of_group, inverse(scale, CAST.POWER_OF_2), mask=j < N)
        if is_past(strips_ptr, STRIPS, at.row, EDGE):
            store_zero_columns(col_ptr, at, TILE)
            return
    # even and odd: (ROWS / 2, COLS) each; scales are (ROWS / 2, 1) for rows, (1, COLS) for columns
    if strips_ptr is None:
        i, end = at.row + 2 * tl.arange(0, ROWS // 2), M
        even, odd = load_finite_halves(x_ptr, at, TILE, "evict_first")
    else:
        i, end = lines_of(strips_ptr, STRIPS, at.row, 2, ROWS, EDGE)
        even, odd = load_halves_of_lines(
            x_ptr, index_ptr, factor_ptr, i, end, at.col, at.N, TILE, "evict_first"
        )
    if row_ptr is not None:
        even_scale = scale_from_amax(tl.load(row_amax_ptr + i, mask=i < end, other=0.0), CAST)
        odd_scale = scale_from_amax(tl.load(row_amax_ptr + i + 1, mask=i + 1 < end, other=0.0), CAST)
        if strips_ptr is None:
            store_rows(row_ptr, even, odd, even_scale[:, None], odd_scale[:, None], at, CAST, TILE, False)
        else:
            store_lines(row_ptr, even, even_scale[:, None], i, i < end, at.col, N, CAST, TILE)
            store_lines(row_ptr, odd, odd_scale[:, None], i + 1, i + 1 < end, at.col, N, CAST, TILE)
        # Programs of one row have the same scale: the first one stores it.
        first = at.col == 0
        tl.store(row_scale_inv_ptr + i, inverse(even_scale, CAST.POWER_OF_2), mask=first & (i < end))
        tl.store(row_scale_inv_ptr + i + 1, inverse(odd_scale, CAST.POWER_OF_2), mask=first & (i + 1 < end))
    if strips_ptr is not None:
        _store_columns_of_groups(
            strips_ptr, col_amax_ptr, col_ptr, even, odd, at, j, COUNT, STRIPS, CAST, EDGE, TILE
        )
    elif col_ptr is not None:
        scale = scale_from_amax(tl.load(col_amax_ptr + j, mask=j < N, other=0.0), CAST)
        store_columns(col_ptr, even, odd, scale[None, :], at, CAST, TILE, False)
        tl.store(col_scale_inv_ptr + j, inverse(scale, CAST.POWER_OF_2), mask=(at.row == 0) & (j < N))


@triton.jit
def _store_columns_of_groups(
    strips_ptr, col_amax_ptr, col_ptr, even, odd, at, j, COUNT, STRIPS,
    CAST: tl.constexpr, EDGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Cast columns with the scales of the groups that their rows are of, and store them."""
    ROWS: tl.constexpr = TILE.ROWS
    group = group_of(strips_ptr, STRIPS, at.row, EDGE)
    if EDGE % ROWS == 0:
        is_one = True
    else:
        is_one = group == group_of(strips_ptr, STRIPS, at.row + ROWS - 1, EDGE)
    if is_one:
        of_columns = col_amax_ptr + group * at.N + j
        amax = tl.load(of_columns, mask=(j < at.N) & (group < COUNT), other=0.0)
        store_columns(col_ptr, even, odd, scale_from_amax(amax, CAST)[None, :], at, CAST, TILE, False)
    else:
        # A tile of several groups: a column has another scale in each of them, so one is loaded for each element.
        groups = group_of(strips_ptr, STRIPS, at.row + 2 * tl.arange(0, ROWS // 2), EDGE)
        of_elements = col_amax_ptr + groups[:, None] * at.N + j[None, :]
        amaxes = tl.load(of_elements, mask=(j < at.N)[None, :] & (groups < COUNT)[:, None], other=0.0)
        store_columns(col_ptr, even, odd, scale_from_amax(amaxes, CAST), at, CAST, TILE, False)


@triton.jit
def quantize_rows(
    x_ptr, row_ptr, row_scale_inv_ptr, N, CAST: tl.constexpr, PART: tl.constexpr, WHOLE: tl.constexpr
):
    """Quantize rowwise alone, one scale per row: a row per program, read for its amax, kept in L2, read again."""
    start, j = tl.program_id(0).to(tl.int64) * N, tl.arange(0, PART)
    # x (M, N) and the rowwise data have the same shape.
    x_row, made_row = x_ptr + start, row_ptr + start
    parts = tl.cdiv(N, PART)
    largest = tl.zeros((PART,), tl.float32)
    for part in range(parts):
        at = part * PART + j
        x = load(x_row + at, inside=at < N, WHOLE=WHOLE, KEEP="evict_last")
        largest = tl.maximum(largest, tl.abs(finite_or_nan(x.to(tl.float32))))
    scale = scale_from_amax(tl.max(largest), CAST)
    tl.store(row_scale_inv_ptr + tl.program_id(0), inverse(scale, CAST.POWER_OF_2))
    # The last part first: it was read last, and is in the nearest cache.
    for done in range(parts):
        at = (parts - 1 - done) * PART + j
        x = load(x_row + at, inside=at < N, WHOLE=WHOLE, KEEP="evict_first")
        made = codes(scaled(finite_or_nan(x.to(tl.float32)), scale, CAST, False), CAST.CODES)
        store(made_row + at, made, inside=at < N, WHOLE=WHOLE)


@triton.jit
def quantize_whole_rows(x_ptr, row_ptr, row_scale_inv_ptr, M, N, CAST: tl.constexpr, TILE: tl.constexpr):
    """Quantize as ``quantize_rows`` for rows of at most COLS elements: a program holds ROWS of them, each read once."""
    row = tl.program_id(0) * TILE.ROWS
    i, j = row + tl.arange(0, TILE.ROWS), tl.arange(0, TILE.COLS)
    # The same numbers, of which Triton sees no more than eight side by side: the bf16 elements of one load.
    j = j // 8 * 8 + j % 8
    # (ROWS, COLS), COLS at least N: a program has whole rows
    at = i.to(tl.int64)[:, None] * N + j[None, :]
    inside = (i < M)[:, None] & (j < N)[None, :]
    x = finite_or_nan(load(x_ptr + at, inside, TILE.WHOLE, "evict_first").to(tl.float32))
    scale = scale_from_amax(tl.max(tl.abs(x), 1), CAST)
    # scale_inv (M, 1)
    store(row_scale_inv_ptr + i, inverse(scale, CAST.POWER_OF_2), i < M, TILE.WHOLE)
    made = codes(scaled(x, scale[:, None], CAST, False), CAST.CODES)
    store(row_ptr + at, made, inside, TILE.WHOLE)


@triton.jit
def quantize_vectors(
    x_ptr, row_ptr, row_scale_inv_ptr, M, N, CAST: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr
):
    """Quantize tiles of 1 x COLS, the rowwise usage alone.

    A program takes every so many-th tile, and reads STAGES - 1 of them ahead.
    """
    tiles = tl.cdiv(M, TILE.ROWS) * tl.cdiv(N, TILE.COLS)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        at = place(index, M, N, TILE.ROWS, TILE.COLS)
        even, odd = load_finite_halves(x_ptr, at, TILE, "evict_first")
        _store_vectors(row_ptr, row_scale_inv_ptr, even, odd, at, CAST, TILE)


@triton.jit(do_not_specialize=["LINES"])
def quantize_crossing_vectors(
    x_ptr, index_ptr, factor_ptr, strips_ptr, row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr, STRIPS, LINES,
    M, N, CAST: tl.constexpr, EDGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Quantize tiles of EDGE x 1 columnwise, and of 1 x EDGE rowwise unless that pointer is None.

    A program takes an (EDGE, EDGE) square, ROWS rows at a time: once for the rows' data and the amaxes of the columns,
    and once more, from L1, for the columns' data. All rows at once take twice the registers. Of groups M are rows as
    laid out, see ``quantize_grouped``; of a matrix ``strips_ptr`` is None. LINES are the rows of x; COLS is EDGE.
    """
    square = place(tl.program_id(0), M, N, EDGE, EDGE)
    HALF: tl.constexpr = TILE.ROWS // 2
    largest = tl.zeros((HALF, EDGE), tl.float32)
    for part in range(EDGE // TILE.ROWS):
        at = moved(square, part * TILE.ROWS, 0)
        if strips_ptr is None:
            even, odd = load_finite_halves(x_ptr, at, TILE, "evict_last")
        else:
            line, stop = lines_of(strips_ptr, STRIPS, at.row, 2, TILE.ROWS, EDGE)
            even, odd = load_halves_of_lines(
                x_ptr, index_ptr, factor_ptr, line, stop, at.col, at.N, TILE, "evict_last"
            )
        largest = tl.maximum(largest, larger_magnitude(even, odd))
        if row_ptr is not None:
            if strips_ptr is None:
                _store_vectors(row_ptr, row_scale_inv_ptr, even, odd, at, CAST, TILE)
            else:
                scales = row_scale_inv_ptr + (square.col // EDGE).to(tl.int64) * LINES
                store_vectors(row_ptr, scales, even, line, line < stop, square.col, N, CAST, TILE)
                store_vectors(row_ptr, scales, odd, line + 1, line + 1 < stop, square.col, N, CAST, TILE)
    scale = scale_from_amax(tl.max(largest, 0), CAST)
    for part in range(EDGE // TILE.ROWS):
        at = moved(square, part * TILE.ROWS, 0)
        if strips_ptr is None:
            even, odd = load_finite_halves(x_ptr, at, TILE, "evict_first")
        else:
            line, stop = lines_of(strips_ptr, STRIPS, at.row, 2, TILE.ROWS, EDGE)
            even, odd = load_halves_of_lines(
                x_ptr, index_ptr, factor_ptr, line, stop, at.col, at.N, TILE, "evict_first"
            )
        store_columns(col_ptr, even, odd, scale[None, :], at, CAST, TILE, False)
    j = square.col + tl.arange(0, EDGE)
    scales = col_scale_inv_ptr + (square.row // EDGE).to(tl.int64) * N + j
    tl.store(scales, inverse(scale, CAST.POWER_OF_2), mask=j < N)


@triton.jit
def _store_vectors(row_ptr, row_scale_inv_ptr, even, odd, at, CAST: tl.constexpr, TILE: tl.constexpr):
    # The scales of one column of tiles lie side by side.
    even_scale = scale_from_amax(tl.max(tl.abs(even), 1), CAST)
    odd_scale = scale_from_amax(tl.max(tl.abs(odd), 1), CAST)
    store_rows(row_ptr, even, odd, even_scale[:, None], odd_scale[:, None], at, CAST, TILE, False)
    scale_inv = tl.join(inverse(even_scale, CAST.POWER_OF_2), inverse(odd_scale, CAST.POWER_OF_2))
    ROWS: tl.constexpr = TILE.ROWS
    line = at.row + tl.arange(0, ROWS)
    # scale_inv [N / COLS, M], stored column-major for cuBLASLt
    scales = row_scale_inv_ptr + (at.col // TILE.COLS).to(tl.int64) * at.M + line
    tl.store(scales, tl.reshape(scale_inv, (ROWS,)), mask=line < at.M)


@triton.jit
def quantize_squares(
    x_ptr, row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr, M, N, STRIDE,
    CAST: tl.constexpr, EDGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Quantize squares of EDGE x EDGE, one cast for both usages; a usage is left out where its pointer is None.

    Of matrices STRIDE elements apart where that is not None; their results follow each other. One program per square. A
    square that is larger than (ROWS, COLS), which are equal, does not fit into registers: it is read in parts for its
    amax, kept in L2, and read in parts again to be cast, the last part first.
    """
    if STRIDE is None:
        square = place(tl.program_id(0), M, N, EDGE, EDGE)
    else:
        # Experts (E, M, N): rowwise alone, each with its own squares.
        matrix, square = place_in_stack(tl.program_id(0), M, N, EDGE, EDGE)
        x_ptr += matrix * STRIDE
        row_ptr += matrix * M * N
        row_scale_inv_ptr += matrix * tl.cdiv(M, EDGE) * tl.cdiv(N, EDGE)
    PARTS: tl.constexpr = EDGE // TILE.ROWS
    if PARTS == 1:
        even, odd = load_finite_halves(x_ptr, square, TILE, "evict_first")
        scale = scale_from_amax(tl.max(larger_magnitude(even, odd)), CAST)
        store_with_one(row_ptr, col_ptr, even, odd, scale, square, CAST, TILE, False)
    else:
        HALF: tl.constexpr = TILE.ROWS // 2
        COLS: tl.constexpr = TILE.COLS
        largest = tl.zeros((HALF, COLS), tl.float32)
        # "evict_last" asks L2 to keep what is read again.
        for part in range(PARTS * PARTS):
            at = moved(square, part // PARTS * TILE.ROWS, part % PARTS * TILE.COLS)
            even, odd = load_finite_halves(x_ptr, at, TILE, "evict_last")
            largest = tl.maximum(largest, larger_magnitude(even, odd))
        scale = scale_from_amax(tl.max(largest), CAST)
        for done in range(PARTS * PARTS):
            part = PARTS * PARTS - 1 - done
            at = moved(square, part // PARTS * TILE.ROWS, part % PARTS * TILE.COLS)
            even, odd = load_finite_halves(x_ptr, at, TILE, "evict_first")
            store_with_one(row_ptr, col_ptr, even, odd, scale, at, CAST, TILE, False)
    scale_inv = inverse(scale, CAST.POWER_OF_2)
    store_scales_of_square(row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr, scale_inv, square, EDGE)


@triton.jit
def cast_part(
    x_ptr, scale_ptr, out_ptr, M, N, OUT_STRIDE, SCALE_STRIDE, first_row, first_col,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, CAST: tl.constexpr, THROUGH: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Cast a part of a matrix, with scales that are known; the part begins at (first_row, first_col).

    Elements are rounded to THROUGH first. Scales serve TILE_ROWS x TILE_COLS elements, None for all rows, all columns.
    The columns of one program lie under one scale.
    """
    _cast_tile(
        x_ptr, scale_ptr, out_ptr, tl.program_id(0), M, N, OUT_STRIDE, SCALE_STRIDE, first_row, first_col,
        TILE_ROWS, TILE_COLS, CAST, THROUGH, TILE,
    )  # fmt: skip


ADDRESS, FIRST_PROGRAM, ROWS, COLS, OUT_OFFSET, OUT_STRIDE = map(tl.constexpr, range(6))
SCALE, SCALE_STRIDE, FIRST_ROW, FIRST_COL, FIELDS = map(tl.constexpr, range(6, 11))
"""Numbers of a part of a matrix in a list of many: its address, the first program that casts it, its (ROWS, COLS)
elements, adjacent; where its codes begin and bytes from row to row of them; where its scales lie, and what
``cast_part`` is told of it."""


@triton.jit
def cast_parts(
    parts_ptr, out_ptr, part_of_program_ptr,
    ELEMENT: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, CAST: tl.constexpr,
    THROUGH: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Cast as ``cast_part`` many parts, listed in parts_ptr, whose data go to one memory at out_ptr.

    Rows and their data begin at multiples of 16 elements if ALIGNED.
    """
    # Parts differ in size, so a table says which part each program is of.
    number = tl.load(part_of_program_ptr + tl.program_id(0))
    part = parts_ptr + number * FIELDS
    index = tl.program_id(0) - tl.load(part + FIRST_PROGRAM).to(tl.int32)
    # An address from the table: one launch reads many tensors.
    x_ptr = tl.load(part + ADDRESS).to(tl.pointer_type(ELEMENT))
    out_ptr += tl.load(part + OUT_OFFSET)
    rows, cols = tl.load(part + ROWS).to(tl.int32), tl.load(part + COLS).to(tl.int32)
    stride = tl.load(part + OUT_STRIDE)
    if ALIGNED:
        x_ptr, out_ptr = tl.multiple_of(x_ptr, 16), tl.multiple_of(out_ptr, 16)
        cols, stride = tl.multiple_of(cols, 16), tl.multiple_of(stride, 16)
    _cast_tile(
        x_ptr, tl.load(part + SCALE).to(tl.pointer_type(tl.float32)), out_ptr, index, rows, cols, stride,
        tl.load(part + SCALE_STRIDE), tl.load(part + FIRST_ROW).to(tl.int32),
        tl.load(part + FIRST_COL).to(tl.int32), TILE_ROWS, TILE_COLS, CAST, THROUGH, TILE,
    )  # fmt: skip


@triton.jit
def _cast_tile(
    x_ptr, scale_ptr, out_ptr, index, M, N, OUT_STRIDE, SCALE_STRIDE, first_row, first_col,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, CAST: tl.constexpr, THROUGH: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    at = place(index, M, N, TILE.ROWS, TILE.COLS)
    i, j = at.row + tl.arange(0, TILE.ROWS), at.col + tl.arange(0, TILE.COLS)
    inside = (i < M)[:, None] & (j < N)[None, :]
    pointers = x_ptr + i.to(tl.int64)[:, None] * N + j[None, :]
    x = load(pointers, inside, TILE.WHOLE, "evict_first" if TILE.WHOLE else "")
    scales = scale_ptr
    if TILE_COLS is not None:
        scales += (first_col + at.col) // TILE_COLS
    if TILE_ROWS is None:
        scale = tl.load(scales)
    else:
        lines = ((first_row + i) // TILE_ROWS).to(tl.int64)
        # (ROWS, 1): scales of this column of tiles, by the rows' place in the whole matrix
        scale = tl.load(scales + lines * SCALE_STRIDE, mask=i < M)[:, None]
    # Rounded to the dtype of the forward first: all-gathered and local casts agree to the bit.
    made = codes(scaled(finite_or_nan(x.to(THROUGH).to(tl.float32)), scale, CAST, True), CAST.CODES)
    out = out_ptr + i.to(tl.int64)[:, None] * OUT_STRIDE + j[None, :]
    store(out, made, inside, TILE.WHOLE)
