"""Kernels that quantize bfloat16 matrices of whole tiles, which they read as ``bf16x2``.

Each kernel is bitwise the one of ``quantize`` that it names, and reads its matrix once, except for half of a 256x256
square.
"""

import triton
import triton.language as tl

from f8sub.kernels.triton.bf16x2 import (
    codes_of_columns,
    codes_of_rows,
    finite_pair,
    high,
    larger_of_each_half,
    larger_within_pairs,
    largest_half_of_tile,
    largest_halves,
    load_gradients,
    load_pairs,
    load_source,
    low,
    order,
    scale_at,
    store_column_words,
    store_inverses,
    store_pairs_with_one,
    store_row_codes,
)
from f8sub.kernels.triton.tile_ops import (
    At,
    inverse,
    moved,
    place,
    scale_from_prior,
    store_scales_of_group_square,
    store_scales_of_square,
    store_zero_columns,
)


@triton.jit
def _source(strips_ptr, STRIPS, at, EDGE: tl.constexpr):
    # The row of x that a tile's first one is, and where its group ends there; see ``quantize_grouped``.
    if strips_ptr is None:
        return at.row, at.M
    else:
        strip = at.row // EDGE
        return tl.load(strips_ptr + strip), tl.load(strips_ptr + STRIPS + strip)


@triton.jit
def _store_past(col_ptr, col_scale_inv_ptr, at, EDGE: tl.constexpr, TILE: tl.constexpr):
    # Rows after the last group: zeros, and scales of 1.
    store_zero_columns(col_ptr, at, TILE)
    scales = col_scale_inv_ptr + (at.row // EDGE).to(tl.int64) * at.N + at.col
    tl.store(scales + tl.arange(0, EDGE), tl.full((EDGE,), 1.0, tl.float32))


@triton.jit
def _cast_vectors(
    row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr, even, odd, LINES, stop, source, at,
    CAST: tl.constexpr, EDGE: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    even_order, odd_order = order(even), order(odd)
    # Left: amaxes of even rows, right: of odd ones, (ROWS / 2,). Of columns left and
    # right are neighbours, (COLS / 2,).
    of_rows = largest_halves(larger_within_pairs(even_order, odd_order), 1) if row_ptr is not None else 0
    of_columns = largest_halves(larger_of_each_half(even_order, odd_order), 0)
    even, odd = finite_pair(even), finite_pair(odd)
    if row_ptr is not None:
        even_scale, odd_scale = scale_at(low(of_rows), CAST), scale_at(high(of_rows), CAST)
        # [N / EDGE, rows of x], as cuBLASLt reads scales of 1x128
        scales = row_scale_inv_ptr + (at.col // EDGE).to(tl.int64) * LINES + source.row
        store_inverses(scales, even_scale, odd_scale, stop - source.row, WHOLE, CAST.POWER_OF_2)
        even_codes = codes_of_rows(even, even_scale[:, None], CAST)
        odd_codes = codes_of_rows(odd, odd_scale[:, None], CAST)
        store_row_codes(row_ptr, even_codes, odd_codes, stop, source, True, WHOLE, TILE)
    left_scale, right_scale = scale_at(low(of_columns), CAST), scale_at(high(of_columns), CAST)
    # [M / EDGE, N]: columns are the rows of the columnwise operand
    scales = col_scale_inv_ptr + (at.row // EDGE).to(tl.int64) * at.N + at.col
    store_inverses(scales, left_scale, right_scale, EDGE, True, CAST.POWER_OF_2)
    words = codes_of_columns(even, odd, left_scale[None, :], right_scale[None, :], CAST)
    store_column_words(col_ptr, words, at, TILE)


@triton.jit(do_not_specialize=["LINES"])
def quantize_paired_vectors(
    x_ptr, index_ptr, factor_ptr, gate_ptr, up_ptr, strips_ptr, row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr,
    STRIPS, LINES, M, N, GATE_WIDTH, GATE_STRIDE,
    CAST: tl.constexpr, EDGE: tl.constexpr, SIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Quantize as ``quantize.quantize_crossing_vectors``, of a matrix or, with a table of strips, of groups.

    It takes all ``launch.PAIRED_REGISTERS``. In another order, such as scales stored after data, ptxas 13 (of Triton
    3.9) spills some of them. For SIDE see ``quantize_one_pass.quantize_group_lines_one_pass``.
    """
    BOTH: tl.constexpr = SIDE == "both"
    at = place(tl.program_id(0), M, GATE_WIDTH if BOTH else N, EDGE, EDGE)
    at = At(at.row, at.col, M, N)
    WHOLE: tl.constexpr = strips_ptr is None
    line, stop = _source(strips_ptr, STRIPS, at, EDGE)
    if not WHOLE:
        # A strip of no group: what a GEMM reads there has to be zeros.
        if line >= stop:
            _store_past(col_ptr, col_scale_inv_ptr, at, EDGE, TILE)
            if BOTH:
                _store_past(col_ptr, col_scale_inv_ptr, moved(at, 0, GATE_WIDTH), EDGE, TILE)
            return
    source = At(line, at.col, M, N)
    if BOTH:
        even, odd, even_up, odd_up = load_gradients(
            x_ptr, gate_ptr, up_ptr, GATE_WIDTH, GATE_STRIDE, stop, source, WHOLE, TILE, "evict_first"
        )
    else:
        even, odd = load_source(
            x_ptr, index_ptr, factor_ptr, gate_ptr, up_ptr, GATE_WIDTH, GATE_STRIDE, stop, source,
            SIDE, WHOLE, TILE, "evict_first",
        )  # fmt: skip
    _cast_vectors(
        row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr, even, odd, LINES, stop, source, at,
        CAST, EDGE, WHOLE, TILE,
    )  # fmt: skip
    if BOTH:
        source, at = moved(source, 0, GATE_WIDTH), moved(at, 0, GATE_WIDTH)
        _cast_vectors(
            row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr, even_up, odd_up, LINES, stop, source, at,
            CAST, EDGE, WHOLE, TILE,
        )  # fmt: skip


@triton.jit
def _cast_square(
    x_ptr, index_ptr, factor_ptr, gate_ptr, up_ptr, strips_ptr, row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr,
    GATE_WIDTH, GATE_STRIDE, stop, source, square,
    CAST: tl.constexpr, EDGE: tl.constexpr, SIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    WHOLE: tl.constexpr = strips_ptr is None
    half = 0
    for start in range(0, EDGE - TILE.COLS, TILE.COLS):
        part = moved(source, 0, start)
        even, odd = load_source(
            x_ptr, index_ptr, factor_ptr, gate_ptr, up_ptr, GATE_WIDTH, GATE_STRIDE, stop, part,
            SIDE, WHOLE, TILE, "evict_last",
        )  # fmt: skip
        half = tl.maximum(half, largest_half_of_tile(order(even), order(odd)))
    # The last COLS columns stay in registers, those before them are read once more to be cast: if a program held a
    # large square whole, an SM would have one program, and nothing to do while that one loads.
    end = moved(square, 0, EDGE - TILE.COLS)
    part = moved(source, 0, EDGE - TILE.COLS)
    even, odd = load_source(
        x_ptr, index_ptr, factor_ptr, gate_ptr, up_ptr, GATE_WIDTH, GATE_STRIDE, stop, part,
        SIDE, WHOLE, TILE, "evict_first",
    )  # fmt: skip
    half = tl.maximum(half, largest_half_of_tile(order(even), order(odd)))
    scale = scale_at(half, CAST)
    store_pairs_with_one(row_ptr, col_ptr, even, odd, scale, square.M, end, end, CAST, True, TILE)
    for start in range(0, EDGE - TILE.COLS, TILE.COLS):
        part = moved(source, 0, start)
        even, odd = load_source(
            x_ptr, index_ptr, factor_ptr, gate_ptr, up_ptr, GATE_WIDTH, GATE_STRIDE, stop, part,
            SIDE, WHOLE, TILE, "evict_first",
        )  # fmt: skip
        at = moved(square, 0, start)
        store_pairs_with_one(row_ptr, col_ptr, even, odd, scale, square.M, at, at, CAST, True, TILE)
    scale_inv = inverse(scale, CAST.POWER_OF_2)
    if strips_ptr is None:
        store_scales_of_square(
            row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr, scale_inv, square, EDGE
        )
    else:
        store_scales_of_group_square(
            row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr, scale_inv, square, EDGE
        )


@triton.jit
def quantize_paired_squares(
    x_ptr, index_ptr, factor_ptr, gate_ptr, up_ptr, strips_ptr, row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr,
    STRIPS, M, N, GATE_WIDTH, GATE_STRIDE,
    CAST: tl.constexpr, EDGE: tl.constexpr, SIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Quantize as ``quantize.quantize_squares`` for columns, and for rows unless their pointer is None.

    With a table of strips it is ``quantize_grouped.quantize_group_squares``. Where SIDE is "both", a program has a
    square of gate, then the one of up at the same place.
    """
    BOTH: tl.constexpr = SIDE == "both"
    square = place(tl.program_id(0), M, GATE_WIDTH if BOTH else N, EDGE, EDGE)
    square = At(square.row, square.col, M, N)
    line, stop = _source(strips_ptr, STRIPS, square, EDGE)
    source = At(line, square.col, M, N)
    _cast_square(
        x_ptr, index_ptr, factor_ptr, gate_ptr, up_ptr, strips_ptr, row_ptr, row_scale_inv_ptr, col_ptr,
        col_scale_inv_ptr, GATE_WIDTH, GATE_STRIDE, stop, source, square, CAST, EDGE, "gate" if BOTH else SIDE, TILE,
    )  # fmt: skip
    if BOTH:
        _cast_square(
            x_ptr, index_ptr, factor_ptr, gate_ptr, up_ptr, strips_ptr, row_ptr, row_scale_inv_ptr, col_ptr,
            col_scale_inv_ptr, GATE_WIDTH, GATE_STRIDE, stop, source, moved(square, 0, GATE_WIDTH),
            CAST, EDGE, "up", TILE,
        )  # fmt: skip


@triton.jit
def cast_pairs_with_prior(
    x_ptr, amax_ptr, prior_ptr, largest_ptr, row_ptr, row_scale_inv_ptr, col_ptr, col_scale_inv_ptr, M, N,
    CAST: tl.constexpr, HEADROOM: tl.constexpr, COVERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Cast as ``quantize.cast_with_one`` with a prior scale, for columns, and for rows unless their pointer is None."""
    # The last tile first: if an amax was taken, its last tiles are still in L2.
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    at = place(index, M, N, TILE.ROWS, TILE.COLS)
    scale = tl.load(prior_ptr)
    # Only where the scale may be missing or has to cover the amax.
    if amax_ptr is not None:
        scale = scale_from_prior(scale, tl.load(amax_ptr), CAST, HEADROOM, COVERS)
    even, odd = load_pairs(x_ptr, at.M, at, True, TILE, "evict_first")
    # Magnitudes have no sign, so that no half is negative; the bits of NaN come last.
    largest = largest_half_of_tile(even & 0x7FFF7FFF, odd & 0x7FFF7FFF)
    tl.atomic_max(largest_ptr, largest << 16, sem="relaxed")
    store_pairs_with_one(row_ptr, col_ptr, even, odd, scale, M, at, at, CAST, True, TILE)
    # A prior scale need not keep to the format's rule.
    scale_inv = inverse(scale, False)
    if row_ptr is not None:
        tl.store(row_scale_inv_ptr, scale_inv, mask=index == 0)
    tl.store(col_scale_inv_ptr, scale_inv, mask=index == 0)
