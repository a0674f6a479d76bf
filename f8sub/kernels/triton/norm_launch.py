"""Layer 1. Which kernels normalize a matrix and cast it, with which arguments, and what they fill."""

from typing import Any, NamedTuple

import torch

from f8sub.formats import Float8Format, Operand
from f8sub.kernels.delayed import PastScale
from f8sub.kernels.fused import EDGE, ROWWISE, TENSORWISE, VECTOR
from f8sub.kernels.normed import Amaxes, Measured
from f8sub.kernels.norms import Norm
from f8sub.kernels.triton import rms_norm, rms_norm_paired
from f8sub.kernels.triton.launch import (
    LINE_ROWS,
    LINES,
    REGISTERS,
    VECTOR_PART,
    VECTOR_WARPS,
    cdiv,
    empty,
    is_paired,
    of_pairs,
    operands,
    programs_of,
    rule,
    tiles_of,
)
from f8sub.kernels.triton.launcher import Launch

MEASURED, MEASURED_WARPS = (2, 1024), 4
"""What one program of ``measure_normed`` reads at a time, its rows and columns of them, and its warps."""

IN_ONE, IN_SQUARES = (64, 128), (64, 128)
"""Tiles of ``cast_normed_with_one``, and parts of ``quantize_normed_squares``."""

PAIRED = {"num_warps": 8}


class Cast(NamedTuple):
    """How normalized elements are cast, and what is filled.

    Attributes:
        launch: the one kernel.
        row: the rowwise operand; None where it is left out.
        col: the columnwise one; likewise.
        largest: float32, (1, 1), the largest magnitude where the scale is of the past; else None.
    """

    launch: Launch
    row: Operand | None
    col: Operand | None
    largest: torch.Tensor | None


def measurement(
    x: torch.Tensor, weight: torch.Tensor, norm: Norm, amaxes: Amaxes
) -> tuple[list[Launch], Measured]:
    """How to find rstd and amaxes, and what is filled.

    Args:
        x: (M, N), more than one row, contiguous; bfloat16 or float16.
        weight: (N,), of x's dtype, contiguous.
        norm: which one.
        amaxes: those asked for.
    """
    rows, cols = x.shape
    # Amaxes are atomic maxima of bits.
    whole, row, col = (
        torch.zeros(shape, dtype=torch.int32, device=x.device) if asked else None
        for shape, asked in (((1, 1), amaxes.whole), (rows, amaxes.lines), (cols, amaxes.lines))
    )
    found = Measured(
        x.new_empty((rows, 1), dtype=torch.float32),
        *(None if bits is None else bits.view(torch.float32) for bits in (whole, row, col)),
    )
    given = _given(x, weight, norm, found)
    arguments = {**given, "amax_ptr": whole, **tiles_of(x, *MEASURED), "EPS": norm.eps, "COUNT": float(cols)}
    options = {"num_warps": MEASURED_WARPS}
    launches = [Launch(rms_norm.measure_normed, cdiv(rows, MEASURED[0]), arguments, options)]
    if amaxes.lines:
        height = LINES["ROWS"] * LINES["STEPS"]
        arguments = {**given, "row_amax_ptr": row, "col_amax_ptr": col}
        arguments |= {**tiles_of(x, height, LINES["COLS"]), **LINES}
        programs = programs_of(x, height, LINES["COLS"])
        launches.append(Launch(rms_norm.amax_of_normed_lines, programs, arguments, {"num_warps": 4}))
    return launches, found


def cast(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: Norm,
    measured: Measured,
    usages: tuple[Float8Format | None, Float8Format | None],
    past: PastScale | None = None,
) -> Cast:
    """How to normalize ``x`` and cast the result.

    Args:
        x: see ``measurement``.
        weight: likewise.
        norm: likewise.
        measured: with the amaxes that the scales are of.
        usages: rowwise and columnwise format, ones that ``fused.why_no_kernel`` has no reason against; None to leave
            a usage out, not both, and equal where neither is.
        past: the scale of the result's past amaxes, for a format with one scale; None for scales of its own amaxes.
    """
    rowwise, columnwise = usages
    format = rowwise or columnwise
    if format is None:
        raise RuntimeError("asked to quantize for no usage")
    row = None if rowwise is None else empty(x, rowwise, *x.shape)
    col = None if columnwise is None else empty(x, columnwise, *x.shape[::-1])
    arguments = {**_given(x, weight, norm, measured), **operands(row, col), **rule(format)}
    largest = None
    if format.tile == TENSORWISE:
        largest = None if past is None else x.new_zeros((1, 1), dtype=torch.float32)
        launch = _with_one(x, arguments, measured.whole_amax, past, largest)
    elif format.tile == ROWWISE:
        arguments.update(row_amax_ptr=measured.row_amax, col_amax_ptr=measured.col_amax)
        arguments |= tiles_of(x, LINE_ROWS, EDGE)
        programs = programs_of(x, LINE_ROWS, EDGE)
        launch = Launch(rms_norm.cast_normed_with_lines, programs, arguments, {"num_warps": 4})
    else:
        launch = _with_blocks(x, arguments, format.tile.cols, format.tile == VECTOR)
    return Cast(launch, row, col, largest)


def _given(x: torch.Tensor, weight: torch.Tensor, norm: Norm, measured: Measured) -> dict[str, Any]:
    return {"x_ptr": x, "weight_ptr": weight, "rstd_ptr": measured.rstd, "ROUNDS": norm.rounds}


def _with_one(
    x: torch.Tensor,
    arguments: dict[str, Any],
    amax: torch.Tensor | None,
    past: PastScale | None,
    largest: torch.Tensor | None,
) -> Launch:
    is_known = past is not None and past.is_known
    arguments |= {
        "amax_ptr": None if is_known else amax,
        "past_ptr": None if past is None else past.scale,
        "largest_ptr": None if largest is None else largest.view(torch.int32),
        "HEADROOM": 1.0 if past is None else 2.0**past.margin,
        **tiles_of(x, *IN_ONE),
    }
    return Launch(rms_norm.cast_normed_with_one, programs_of(x, *IN_ONE), arguments)


def _with_blocks(x: torch.Tensor, arguments: dict[str, Any], edge: int, vectors: bool) -> Launch:
    arguments |= {**tiles_of(x, edge, edge), "EDGE": edge}
    programs = programs_of(x, edge, edge)
    if vectors:
        del arguments["ROWS"], arguments["COLS"]
        if is_paired(x, edge) and arguments["weight_ptr"].data_ptr() % 4 == 0:
            return Launch(
                rms_norm_paired.quantize_paired_normed_vectors, programs, of_pairs(arguments), PAIRED
            )
        arguments["PART"] = VECTOR_PART
        options = {"num_warps": VECTOR_WARPS}
        return Launch(rms_norm.quantize_normed_vectors, programs, arguments, options)
    arguments.update(ROWS=IN_SQUARES[0], COLS=IN_SQUARES[1])
    options = {"num_warps": 8, "maxnreg": REGISTERS}
    return Launch(rms_norm.quantize_normed_squares, programs, arguments, options)
