"""Measures one operand, in numbers that can be added over ranks, and advises on it.

A SQNR is the ratio of signal to quantization noise in dB. The SQNR of a whole matrix hides small rows: the large ones
decide it. So each row has one, and the median of those is told from a histogram, which ranks can add.

triton is imported when the launches are made that compare a matrix with its codes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from f8sub.formats import ALL, E2M1, Float8Format, Operand, Tile
from f8sub.kernels import reference
from f8sub.kernels.triton import support

if TYPE_CHECKING:
    from f8sub.kernels.triton.launch import Launch


FINITE = torch.finfo(torch.float32).max


def has_kernel(operand: Operand) -> bool:
    """Return whether the kernels read an operand's data: one byte per element, under scales of one level."""
    plain = operand.format.dtype != E2M1 and operand.format.hadamard is None
    return plain and operand.global_scale_inv is None


def launches_of(
    values: torch.Tensor,
    operand: Operand,
    scale_inv: torch.Tensor,
    step: int,
    sums: torch.Tensor,
    maxima: torch.Tensor,
    constants: dict[str, float],
) -> "list[Launch]":
    """Return the launches that add what one matrix has to ``sums`` and ``maxima``; see ``add_measured``.

    Args:
        values: (rows, cols), in the dtype that was cast.
        operand: its codes, which ``has_kernel`` takes.
        scale_inv: its scales, float32.
        step: a row of so many is looked at; amax and scales are of all.
        sums: a contiguous row of ``statistics.WIDTH`` numbers.
        maxima: a contiguous row of three.
        constants: what ``measure_rows`` is told of formats and of the histogram.
    """
    from f8sub.diagnostics import statistics_kernels
    from f8sub.kernels.triton.launch import Launch
    from f8sub.kernels.triton.quantize_launch import CODES

    # A matrix whose rows have gaps is read as it lies; one that lies otherwise is not.
    values = values if values.stride(1) == 1 else values.contiguous()
    codes = operand.data if operand.data.stride(1) == 1 else operand.data.contiguous()
    rows, tile = -(-values.shape[0] // step), operand.format.tile
    # [signal, noise, sums of values and of errors; rows]
    of_rows = torch.empty(4, rows, dtype=torch.float32, device=values.device)
    # Over all elements, also those whose errors are not looked at.
    amax = torch.linalg.vector_norm(values, torch.inf)
    # The largest scale_inv belongs to the smallest scale.
    low, high = (scale_inv, scale_inv) if scale_inv.numel() == 1 else torch.aminmax(scale_inv)
    measured = {
        "values_ptr": values,
        "codes_ptr": codes.view(torch.uint8),
        "scale_inv_ptr": scale_inv,
        "sums_ptr": sums,
        "of_rows_ptr": of_rows,
        "cols": values.shape[1],
        "value_stride": values.stride(0),
        "code_stride": codes.stride(0),
        "scale_row_stride": scale_inv.stride(0),
        "scale_col_stride": scale_inv.stride(1),
        "step": step,
        "rows": rows,
        "SOURCE": CODES[operand.format.dtype],
        "LARGEST": operand.format.max,
        # 0 is all of the dimension
        "TILE_ROWS": 0 if tile.rows == ALL else tile.rows,
        "TILE_COLS": 0 if tile.cols == ALL else tile.cols,
        "FINITE": FINITE,
        "BLOCK": 1024,
        **constants,
    }
    added = {
        "of_rows_ptr": of_rows,
        "amax_ptr": amax,
        "lowest_scale_inv_ptr": low,
        "largest_scale_inv_ptr": high,
        "sums_ptr": sums,
        "maxima_ptr": maxima,
        "rows": rows,
        "count": rows * values.shape[1],
        "SIGNAL": constants["COUNTS"] + 4,
        "BLOCK": 1024,
    }
    return [
        Launch(statistics_kernels.measure_rows, rows, measured, {"num_warps": 4}),
        # One program adds all rows in their order, so that sums have the same bits every time.
        Launch(statistics_kernels.add_rows, 1, added, {"num_warps": 4}),
    ]


SUMS = ("count", "nonzero", "saturated", "flushed", "subnormal", "signal", "noise", "total", "error")
"""Added over ranks: elements, those that are not 0, those cut off at the largest code, those with code 0 that are not
0, subnormal codes, sums of squares of the values and of the errors, and sums of the values and of the errors."""

_CUT_OFF = 1.125
"""How many times its code's value an element is that counts as saturated: a scale that e4m3 stores is off by less."""

MAXIMA = ("amax", "scale_max", "minus_scale_min")
"""The maximum over ranks is taken of these."""

LOWEST, STEP, BINS = -20.0, 0.5, 168
"""The histogram of rows' SQNR: dB of its first bin, dB of a bin, number of bins."""

WIDTH = len(SUMS) + BINS
"""Numbers of one operand that are added."""

LOOKED_AT = 2**21
"""Elements of a matrix whose errors are looked at, in rows as far apart as that takes; the amax is of all elements.

Without kernels some 200 bytes move for each, which of all of a large matrix would take longer than the products that
read it.
"""

_SMALLEST_NORMAL = {torch.float8_e4m3fn: 2.0**-6, torch.float8_e5m2: 2.0**-14, E2M1: 1.0}
"""Source: the OCP's formats, and NVFP4's e2m1."""


class Measured(NamedTuple):
    """Holds the sums and maxima of one matrix: float32, (``WIDTH``,) and (``len(MAXIMA)``,), on its device."""

    sums: torch.Tensor
    maxima: torch.Tensor


def measure(values: torch.Tensor, operand: Operand) -> Measured:
    """Compare a matrix with its codes, without waiting for the device; see ``add_measured``."""
    sums = torch.zeros(WIDTH, dtype=torch.float32, device=values.device)
    # -inf is neutral in a maximum
    maxima = torch.full((len(MAXIMA),), -torch.inf, dtype=torch.float32, device=values.device)
    add_measured(values, operand, sums, maxima)
    return Measured(sums, maxima)


def add_measured(values: torch.Tensor, operand: Operand, sums: torch.Tensor, maxima: torch.Tensor) -> None:
    """Compare a matrix with its codes, and add what is found to a row of a table, without waiting for the device.

    On a GPU this is five launches at most: most of what a sample costs is launches.

    Args:
        values: (rows, cols), not empty, in the dtype that was cast.
        operand: its rowwise operand.
        sums: float32, (``WIDTH``,); added to in place.
        maxima: float32, (``len(MAXIMA)``,); each is the larger of before and now.
    """
    # At most about LOOKED_AT elements, in every step-th row.
    step, scale_inv = -(-values.numel() // LOOKED_AT), operand.scale_inv.float()
    if support.takes(values) and has_kernel(operand):
        with support.device_of(values):
            for launch in launches_of(
                values, operand, scale_inv, step, sums, maxima, _constants(operand.format)
            ):
                launch.run()
        return
    found = _measured(values, operand, scale_inv, step)
    sums += found.sums
    torch.maximum(maxima, found.maxima, out=maxima)


def _constants(format: Float8Format) -> dict[str, float]:
    """Return the kernels' constants: limits of a format, and where each number stands in ``sums``."""
    histogram = {"BINS_AT": len(SUMS), "BINS": BINS, "LOWEST": LOWEST, "STEP": STEP}
    limits = {"CUT_OFF": _CUT_OFF, "SMALLEST_NORMAL": _SMALLEST_NORMAL[format.dtype]}
    return {"COUNTS": SUMS.index("nonzero"), **histogram, **limits}


def _measured(values: torch.Tensor, operand: Operand, scale_inv: torch.Tensor, step: int) -> Measured:
    """Do ``add_measured`` in plain PyTorch: the specification of the kernels."""
    amax = torch.linalg.vector_norm(values, torch.inf)
    if step > 1:
        values, operand = values[::step], _every(operand, step)
    exact = values.float()
    # Operands may be filled up along K: that part is cut off.
    made = reference.dequantize(operand, torch.float32)[:, : exact.shape[1]]
    codes = _magnitudes(operand)[:, : exact.shape[1]]
    nonzero, is_zero = exact != 0, codes == 0
    counted = [
        nonzero,
        # Cut off, and not just rounded to the largest number.
        (codes >= operand.format.max) & (exact.abs() > _CUT_OFF * made.abs()),
        is_zero & nonzero,
        (codes < _SMALLEST_NORMAL[operand.format.dtype]) & ~is_zero,
    ]
    counts = torch.stack(counted).sum((1, 2), dtype=torch.float32)
    # Of the values and of the errors: sums, then signal and noise of each row.
    both = torch.stack([exact, made - exact])
    totals = both.sum((1, 2))
    of_rows = both.square_().sum(2)
    row_db = 10 * (of_rows[0] / of_rows[1].clamp(min=1e-38)).log10()
    # Rows of zeros have -inf dB, and weight 0 in the histogram.
    bins = ((row_db - LOWEST) / STEP).nan_to_num(0.0).clamp(0, BINS - 1).long()
    histogram = torch.zeros(BINS, dtype=torch.float32, device=exact.device)
    histogram.scatter_add_(0, bins, (of_rows[0] > 0).float())
    if operand.global_scale_inv is not None:
        scale_inv = scale_inv * operand.global_scale_inv
    count = torch.full((1,), exact.numel(), dtype=torch.float32, device=exact.device)
    return Measured(
        torch.cat([count, counts, of_rows.sum(1), totals, histogram]),
        # In the order of MAXIMA: the smallest scale is the maximum of negative ones.
        torch.stack([amax.float(), 1 / scale_inv.amin(), -1 / scale_inv.amax()]),
    )


def _every(operand: Operand, step: int) -> Operand:
    """Return every ``step``-th row of an operand, each with its own scales."""
    tile, scale_inv = operand.format.tile, operand.scale_inv
    if tile.rows not in (1, ALL):
        rows = (
            torch.arange(0, len(operand.data), step, dtype=torch.int64, device=scale_inv.device) // tile.rows
        )
        # By their bytes: index_select does not take every float8 dtype.
        scale_inv = scale_inv.view(torch.uint8) if scale_inv.itemsize == 1 else scale_inv
        scale_inv = scale_inv.index_select(0, rows).view(operand.scale_inv.dtype)
    elif tile.rows == 1:
        scale_inv = scale_inv[::step]
    format = replace(operand.format, tile=Tile(ALL if tile.rows == ALL else 1, tile.cols))
    return Operand(operand.data[::step], scale_inv, format, operand.global_scale_inv)


def _magnitudes(operand: Operand) -> torch.Tensor:
    """Return the magnitudes of the data without scales: float32, (rows, cols)."""
    if operand.format.dtype != E2M1:
        return operand.data.float().abs_()
    plain = Float8Format(operand.format.dtype, operand.format.tile)
    ones = torch.ones(operand.scale_inv.shape, dtype=torch.float32, device=operand.data.device)
    return reference.dequantize(Operand(operand.data, ones, plain), torch.float32).abs()


GRADIENT = "gradient"
"""The role of rows that tell the error of a module's reduced gradients, by ``sqnr`` alone."""

ATTENTION = "attention"
"""The role of rows of what attention in float8 returns, beside what it would have been; they have a ``sqnr`` alone."""

ERRORS_ALONE = (GRADIENT, ATTENTION)
"""Roles of rows that have no statistics but ``sqnr``."""


class Statistics(NamedTuple):
    """Holds the statistics of one operand, or of a module's reduced gradients, in one step; NaN is not measured.

    Attributes:
        step: number of the step.
        layer: full name.
        role: "x", "w" or "dy", or "gradient".
        format: as documentation names it.
        amax: largest magnitude.
        rms: root of the mean square.
        mean: of the values.
        bias: mean of the errors, as a share of ``rms``.
        scale_min: the smallest scale of its tiles.
        scale_max: the largest.
        saturated: share of elements, not 0, that are cut off at the largest code, by more than an eighth.
        flushed: share of elements, not 0, whose code is 0.
        subnormal: share of elements, not 0, whose code is subnormal.
        sqnr: of the whole matrix, dB.
        row_sqnr: the median of its rows', dB; to half a dB.
    """

    step: int
    layer: str
    role: str
    format: str
    amax: float
    rms: float
    mean: float
    bias: float
    scale_min: float
    scale_max: float
    saturated: float
    flushed: float
    subnormal: float
    sqnr: float
    row_sqnr: float


def statistics_of(
    step: int, layer: str, role: str, format: Float8Format, sums: list[float], maxima: list[float]
) -> Statistics | None:
    """Return the statistics of what ranks added; None if no rank had an element."""
    found = dict(zip(SUMS, sums, strict=False))
    amax, scale_max, minus_scale_min = maxima
    if not found["count"]:
        return None
    # Shares of an operand of zeros are 0.
    nonzero = max(found["nonzero"], 1.0)
    rms = (found["signal"] / found["count"]) ** 0.5
    return Statistics(
        step=step,
        layer=layer,
        role=role,
        format=str(format),
        amax=amax,
        rms=rms,
        mean=found["total"] / found["count"],
        bias=found["error"] / found["count"] / (rms or 1.0),
        scale_min=-minus_scale_min,
        scale_max=scale_max,
        saturated=found["saturated"] / nonzero,
        flushed=found["flushed"] / nonzero,
        subnormal=found["subnormal"] / nonzero,
        sqnr=decibels(found["signal"], found["noise"]),
        row_sqnr=_median(sums[len(SUMS) :]),
    )


def decibels(signal: float, noise: float) -> float:
    """Return the ratio of two sums of squares, in dB."""
    # A signal of 0 has -inf dB; math.log10 would raise.
    ratio = torch.tensor(signal / max(noise, 1e-38), dtype=torch.float64, device="cpu")
    return float(10 * ratio.log10())


def _median(histogram: list[float]) -> float:
    """Return the middle, in dB, of the bin that holds the median; NaN for no rows."""
    # Half of the rows are below the median.
    left = sum(histogram) / 2
    for index, count in enumerate(histogram):
        left -= count
        if left <= 0 < count:
            return LOWEST + (index + 0.5) * STEP
    return float("nan")


class Rule(NamedTuple):
    """Advises on one kind of trouble.

    Attributes:
        name: in one word.
        applies: whether it does.
        advice: what to do.
    """

    name: str
    applies: Callable[[Statistics], bool]
    advice: str


RULES = (
    Rule(
        "outliers",
        lambda s: s.row_sqnr < s.sqnr - 6,
        "a few large rows decide the scale of all: give this layer a recipe with scales of rows or blocks",
    ),
    Rule(
        "saturated",
        lambda s: s.saturated > 1e-3 and s.sqnr < 25,
        "values exceed what the scale was made for: more margin, or a recipe that scales by the current amax",
    ),
    Rule(
        "flushed",
        lambda s: s.flushed > 0.2,
        "small values become 0: give this layer a recipe with smaller tiles",
    ),
    Rule(
        "poor",
        lambda s: s.row_sqnr < 15,
        "float8 keeps little of it: skip this layer, or with_high_precision for the GEMMs that read it",
    ),
)
"""In order; the first that applies is told.

e4m3 keeps 31.5 dB of a Gaussian and e5m2 25.4; 6 dB is a bit. The limits separate the data sets of the tests: a
Gaussian triggers no rule, each known trouble its own.
"""


def advice_for(statistics: Statistics) -> str:
    """Return what to do; empty if nothing is wrong."""
    return next((rule.advice for rule in RULES if rule.applies(statistics)), "")
