"""Layer 1. Which kernels normalize a matrix and cast it, with which arguments, and what they fill."""

from typing import Any, NamedTuple

import torch

from f8sub.formats import Float8Format, Operand
from f8sub.kernels.delayed import PastScale
from f8sub.kernels.fused import EDGE, ROWWISE, TENSORWISE, VECTOR
from f8sub.kernels.normed import Measured
from f8sub.kernels.norms import Norm
from f8sub.kernels.triton import rms_norm, rms_norm_paired
from f8sub.kernels.triton.launch import (
    LINE_ROWS,
    LINES,
    REGISTERS,
    VECTOR_PART,
    VECTOR_WARPS,
    as_amaxes,
    cdiv,
    empty,
    is_paired,
    of_pairs,
    operands,
    programs_of,
    rule,
    tiles_of,
    zeroed,
)
from f8sub.kernels.triton.launcher import Launch

MEASURED, MEASURED_WARPS = (2, 1024), 4
"""What one program of ``measure_normed`` reads at a time, its rows and columns of them, and its warps."""

IN_ONE, IN_SQUARES = (64, 128), (64, 128)
"""Tiles of ``cast_normed_with_one``, and parts of ``quantize_normed_squares``."""


class Cast(NamedTuple):
    """How normalized elements are cast, and what is filled.

    Attributes:
        launches: in order.
        row: the rowwise operand; None where it is left out.
        col: the columnwise one; likewise.
        largest: float32, (1, 1), the largest magnitude where the scale is of the past; else None.
    """

    launches: list[Launch]
    row: Operand | None
    col: Operand | None
    largest: torch.Tensor | None


def measurement(
    x: torch.Tensor, weight: torch.Tensor, norm: Norm, needs_amax: bool
) -> tuple[Launch, Measured]:
    """How to find rstd and the amax, and what is filled.

    Args:
        x: (M, N), more than one row, contiguous; bfloat16 or float16.
        weight: (N,), of x's dtype, contiguous.
        norm: which one.
        needs_amax: whether it is asked for.
    """
    rows, cols = x.shape
    found = Measured(
        x.new_empty((rows, 1), dtype=torch.float32),
        x.new_zeros((1, 1), dtype=torch.float32) if needs_amax else None,
    )
    arguments = {
        **_given(x, weight, norm, found),
        # An atomic maximum of bits.
        "amax_ptr": None if found.whole_amax is None else found.whole_amax.view(torch.int32),
        **tiles_of(x, *MEASURED),
        "EPS": norm.eps,
        "COUNT": float(cols),
    }
    options = {"num_warps": MEASURED_WARPS}
    return Launch(rms_norm.measure_normed, cdiv(rows, MEASURED[0]), arguments, options), found


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
        measured: with the amax that the scale is of, for a format with one scale.
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
    given = _given(x, weight, norm, measured)
    make = {**operands(row, col), **rule(format)}
    if format.tile == ROWWISE:
        return Cast(_with_lines(x, given, make), row, col, None)
    arguments, largest = {**given, **make}, None
    if format.tile == TENSORWISE:
        largest = None if past is None else x.new_zeros((1, 1), dtype=torch.float32)
        launch = _with_one(x, arguments, measured.whole_amax, past, largest)
    else:
        launch = _with_blocks(x, arguments, format.tile.cols, format.tile == VECTOR)
    return Cast([launch], row, col, largest)


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


def _with_lines(x: torch.Tensor, given: dict[str, Any], make: dict[str, Any]) -> list[Launch]:
    counts = {
        f"{lines}_amax_ptr": 0 if make[f"{lines}_ptr"] is None else count
        for lines, count in zip(("row", "col"), x.shape, strict=True)
    }
    found = zeroed(counts, x.device)
    height, width = LINES["ROWS"] * LINES["STEPS"], LINES["COLS"]
    find = {**given, **found, **tiles_of(x, height, width), **LINES}
    make = {**given, **make, **as_amaxes(found), **tiles_of(x, LINE_ROWS, EDGE)}
    options = {"num_warps": 4}
    return [
        Launch(rms_norm.amax_of_normed_lines, programs_of(x, height, width), find, options),
        Launch(rms_norm.cast_normed_with_lines, programs_of(x, LINE_ROWS, EDGE), make, options),
    ]


def _with_blocks(x: torch.Tensor, arguments: dict[str, Any], edge: int, vectors: bool) -> Launch:
    arguments |= {**tiles_of(x, edge, edge), "EDGE": edge}
    programs = programs_of(x, edge, edge)
    if vectors:
        del arguments["ROWS"], arguments["COLS"]
        if is_paired(x, edge) and arguments["weight_ptr"].data_ptr() % 4 == 0:
            return Launch(rms_norm_paired.quantize_paired_normed_vectors, programs, of_pairs(arguments))
        arguments["PART"] = VECTOR_PART
        options = {"num_warps": VECTOR_WARPS}
        return Launch(rms_norm.quantize_normed_vectors, programs, arguments, options)
    arguments.update(ROWS=IN_SQUARES[0], COLS=IN_SQUARES[1])
    options = {"num_warps": 8, "maxnreg": REGISTERS}
    return Launch(rms_norm.quantize_normed_squares, programs, arguments, options)
