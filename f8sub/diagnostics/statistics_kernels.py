"""Triton: one matrix compared with its codes, in two launches.

``measure_rows`` has a program for each row that is looked at, and ``add_rows`` one program, which adds what rows have
in their order, so that the sums have the same bits every time. Counts are whole numbers, whose order does not matter.
"""

import triton
import triton.language as tl


@triton.jit
def measure_rows(
    values_ptr, codes_ptr, scale_inv_ptr, sums_ptr, of_rows_ptr,
    cols, value_stride, code_stride, scale_row_stride, scale_col_stride,
    step, rows,
    SOURCE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST_NORMAL: tl.constexpr, CUT_OFF: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, FINITE: tl.constexpr,
    COUNTS: tl.constexpr, BINS_AT: tl.constexpr, BINS: tl.constexpr, LOWEST: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Measure one row in ``step``: add its counts and bin to ``sums_ptr``, store its squares.

    The squares, and then sums, go to ``of_rows_ptr``, float32, (4, rows): signal, noise, values and errors. A TILE edge
    of 0 is all of the dimension. The four counts begin at COUNTS, the bins at BINS_AT.
    """
    number = tl.program_id(0)
    # int64: row * stride may exceed 2**31
    row = number.to(tl.int64) * step
    values, codes_of_row = values_ptr + row * value_stride, codes_ptr + row * code_stride
    scales = scale_inv_ptr
    if TILE_ROWS:
        scales += row // TILE_ROWS * scale_row_stride
    signal = tl.zeros((BLOCK,), tl.float32)
    noise = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    errors = tl.zeros((BLOCK,), tl.float32)
    nonzero = tl.zeros((BLOCK,), tl.int32)
    saturated, flushed, subnormal = nonzero, nonzero, nonzero
    for first in range(0, cols, BLOCK):
        i = first + tl.arange(0, BLOCK)
        inside = i < cols
        exact = tl.load(values + i, mask=inside, other=0.0).to(tl.float32)
        code = tl.load(codes_of_row + i, mask=inside, other=0).to(SOURCE, bitcast=True).to(tl.float32)
        if TILE_COLS:
            scale = tl.load(scales + i // TILE_COLS * scale_col_stride, mask=inside, other=1.0)
        else:
            # one scale for the row
            scale = tl.load(scales)
        made = code * scale
        made = tl.where(made > FINITE, FINITE, tl.where(made < -FINITE, -FINITE, made))
        is_set, magnitude = exact != 0.0, tl.abs(code)
        is_zero = magnitude == 0.0
        is_top = (magnitude >= LARGEST) & (tl.abs(exact) > CUT_OFF * tl.abs(made))
        nonzero += is_set.to(tl.int32)
        saturated += is_top.to(tl.int32)
        flushed += (is_zero & is_set).to(tl.int32)
        subnormal += ((magnitude < SMALLEST_NORMAL) & (magnitude > 0.0)).to(tl.int32)
        signal += exact * exact
        noise += (made - exact) * (made - exact)
        total += exact
        errors += tl.where(inside, made - exact, 0.0)
    of_row, error = tl.sum(signal), tl.sum(noise)
    tl.store(of_rows_ptr + number, of_row)
    tl.store(of_rows_ptr + rows + number, error)
    tl.store(of_rows_ptr + 2 * rows + number, tl.sum(total))
    tl.store(of_rows_ptr + 3 * rows + number, tl.sum(errors))
    tl.atomic_add(sums_ptr + COUNTS, tl.sum(nonzero).to(tl.float32), sem="relaxed")
    tl.atomic_add(sums_ptr + COUNTS + 1, tl.sum(saturated).to(tl.float32), sem="relaxed")
    tl.atomic_add(sums_ptr + COUNTS + 2, tl.sum(flushed).to(tl.float32), sem="relaxed")
    tl.atomic_add(sums_ptr + COUNTS + 3, tl.sum(subnormal).to(tl.float32), sem="relaxed")
    ratio = of_row / tl.where(error < 1e-38, 1e-38, error)
    # 10 * log10(2) = 3.01...
    bin = (tl.log2(ratio) * 3.0102999566398120 - LOWEST) / STEP
    bin = tl.where(bin >= 0.0, tl.where(bin < BINS, bin, BINS - 1.0), 0.0)  # of NaN 0
    if of_row > 0.0:
        tl.atomic_add(sums_ptr + BINS_AT + bin.to(tl.int32), 1.0, sem="relaxed")


@triton.jit
def add_rows(
    of_rows_ptr, amax_ptr, lowest_scale_inv_ptr, largest_scale_inv_ptr, sums_ptr, maxima_ptr,
    rows, count,
    SIGNAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add what rows have, and ``count`` elements, to ``sums_ptr``; have ``maxima_ptr`` take the three extremes.

    What rows have is added from SIGNAL on, in its order.
    """
    # One program runs here, so no atomics are needed.
    tl.store(sums_ptr, tl.load(sums_ptr) + count)
    for kind in tl.static_range(4):
        found = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, rows, BLOCK):
            i = first + tl.arange(0, BLOCK)
            found += tl.load(of_rows_ptr + kind * rows + i, mask=i < rows, other=0.0)
        tl.store(sums_ptr + SIGNAL + kind, tl.load(sums_ptr + SIGNAL + kind) + tl.sum(found))
    _take(maxima_ptr, tl.load(amax_ptr).to(tl.float32))
    _take(maxima_ptr + 1, tl.div_rn(1.0, tl.load(lowest_scale_inv_ptr)))
    _take(maxima_ptr + 2, -tl.div_rn(1.0, tl.load(largest_scale_inv_ptr)))


@triton.jit
def _take(maximum_ptr, value):
    before = tl.load(maximum_ptr)
    # NaN, which is unequal to itself, wins over every number.
    tl.store(maximum_ptr, tl.where((value > before) | (value != value), value, before))
