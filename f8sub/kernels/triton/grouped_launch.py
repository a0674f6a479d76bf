"""Which kernels run over groups of rows, with which arguments, and the codes they fill."""

from typing import Any

import torch

from f8sub.formats import MULTIPLE, Operand
from f8sub.kernels.triton import grouped_casts, in_turn, paired_casts
from f8sub.kernels.triton.launch import (
    PAIRED_REGISTERS,
    PAIRED_SQUARE_COLS,
    PAIRED_SQUARES,
    REGISTERS,
    SQUARE,
    WARPS_4,
    WARPS_8,
    cast_to,
    cdiv,
    covering,
    is_paired,
    operands,
    shape_of,
)
from f8sub.kernels.triton.launcher import Launch
from f8sub.kernels.triton.prepared import Made
from f8sub.kernels.triton.strips import lay_out
from f8sub.kernels.triton.support import EDGE, EXPONENT_VECTOR, ROWWISE, VECTOR

STRIP = MULTIPLE
"""Rows of a strip where codes of groups begin anywhere: as few as the fewest that columnwise codes are aligned to."""

WHOLE_STRIPS = 16
"""Tables have a multiple of so many strips, so that every tile of up to 256 rows has all of its strips in there."""

CELLS = 8192
"""Strips times groups that a program of ``lay_out`` compares: 32 registers of each of its threads."""

AMAX = 64, 256
"""Tiles of ``amax_of_groups``."""

LINES, LINES_READ = (STRIP, 256), {"STEPS": 32, "STAGES": 5}
"""Tiles of ``amax_of_group_lines``; one program reads 32 of them below each other, four ahead."""

CAST = 64, EDGE
"""Tiles of the kernels that cast with scales of lines: fewer rows, fewer tiles that are of two groups."""

TURN_BYTES, AHEAD_BYTES, LEAST_BYTES = 6 * 2**20, 5 * 2**20, 48 * 2**20
"""Casts are in turn where groups have no more bytes than the first on average, so many ahead, of so large a matrix.

An H100's L2 has 50 MiB, of which an SM is near to half. A group, what is read ahead, and as many bytes of codes fit.
What is ahead are more programs than run at once, 600, so that who casts finds its group's amaxes done.
"""

TURN_REGISTERS = 72
"""Of a thread of casts in turn: seven programs on an SM. For columns alone they need fewer if no number is given."""


def quantization(
    x: torch.Tensor,
    ends: torch.Tensor,
    row: Operand | None,
    col: Operand | None,
    edge: int,
    rows: int,
    laid_out: tuple[torch.Tensor, torch.Tensor] | None,
) -> Made:
    """How to quantize rows in groups that follow each other, for both usages.

    Args:
        x: (M, K), not empty, contiguous; float32, bfloat16 or float16; K a multiple of 16.
        ends: int32, of at least one group: the row after the last one of each.
        row: what is filled with rowwise codes and scales; None to leave it out. One scale a row or a vector alone is
            for the kernels of a whole matrix.
        col: the same of columnwise ones, (K, rows), of the same format; one usage at least.
        edge: rows of a strip, a multiple of 16; groups are laid out from multiples of it on.
        rows: that groups laid out so take at most.
        laid_out: filled with the first row and the end of each group in the codes; None where codes have x's rows.
    """
    format = next(made.format for made in (row, col) if made is not None)
    tile = format.tile
    strips = -(-rows // edge)
    strips += -strips % WHOLE_STRIPS
    is_laid_out = col is not None and edge % CAST[0] == 0
    is_of_groups = is_laid_out and (tile.is_whole or tile == ROWWISE)
    turns = rows // edge if is_of_groups and is_in_turn(x, len(ends)) and is_paired(x, EDGE, rows) else 0
    table = torch.empty(3 * (strips + turns), dtype=torch.int32, device=x.device)
    filled = {
        "x_ptr": x,
        "ends_ptr": ends,
        "strips_ptr": table,
        "turns_ptr": table[3 * strips :] if turns else None,
        "STRIPS": strips,
        "TURNS": turns,
        "COUNT": len(ends),
        "M": rows,
        "N": x.shape[1],
        "LINES": len(x),
        "EDGE": edge,
        "CAST": cast_to(format),
        **operands(row, col),
    }
    launches, scratch = [_laying_out(filled, laid_out)], None
    if turns:
        one, scratch = _in_turn(filled, tile.is_whole)
        launches.append(one)
    elif tile.is_whole:
        made, scratch = _one_scale(filled)
        launches += made
    elif tile == ROWWISE:
        made, scratch = _lines(filled)
        launches += made
    elif tile == VECTOR:
        launches.append(_vectors(filled))
    elif tile == EXPONENT_VECTOR:
        launches.append(covering(grouped_casts.quantize_group_exponents, filled, CAST, WARPS_4))
    else:
        launches.append(_squares(filled))
    results = [tensor for made in (row, col) if made is not None for tensor in (made.data, made.scale_inv)]
    return Made(launches, [*results, *(laid_out or ()), table], () if scratch is None else (scratch,))


def is_in_turn(x: torch.Tensor, count: int) -> bool:
    """Whether so many groups of a matrix are so small that L2 holds what was read of one until it is cast."""
    return LEAST_BYTES <= x.nbytes <= TURN_BYTES * count


def _in_turn(filled: dict[str, Any], is_whole: bool) -> tuple[Launch, torch.Tensor]:
    """Amaxes and casts in one launch, and its scratch memory."""
    x, count, edge = filled["x_ptr"], filled["COUNT"], filled["EDGE"]
    rows, cols = (0, 1) if is_whole else (0 if filled["row_ptr"] is None else len(x), x.shape[1])
    # One allocation; each part begins at a multiple of 16 bytes.
    counts = [count + -count % 4, rows + -rows % 4, count * cols]
    scratch = torch.zeros(sum(counts), dtype=torch.int32, device=x.device)
    done, of_rows, of_groups = scratch.split(counts)
    kernel = in_turn.quantize_groups_in_turn if is_whole else in_turn.quantize_lines_in_turn
    options = WARPS_4 if filled["row_ptr"] is None else {**WARPS_4, "maxnreg": TURN_REGISTERS}
    arguments = {
        **filled,
        "done_ptr": done,
        "amax_ptr": of_groups,
        "row_amax_ptr": of_rows if rows else None,
        "col_amax_ptr": of_groups,
        "TILE": shape_of(*CAST, True),
    }
    programs = 2 * filled["TURNS"] * (edge // CAST[0]) * (x.shape[1] // CAST[1])
    return Launch(kernel, programs, arguments, options), scratch


def _laying_out(filled: dict[str, Any], laid_out: tuple[torch.Tensor, torch.Tensor] | None) -> Launch:
    count, strips = filled["COUNT"], filled["STRIPS"]
    held = max(16, 1 << (count - 1).bit_length())
    block = min(256, CELLS // held)
    first, laid_ends = laid_out or (None, None)
    x = filled["x_ptr"]
    arguments = {
        **filled,
        "first_ptr": first,
        "laid_ends_ptr": laid_ends,
        "ROWS": filled["LINES"],
        "AHEAD": cdiv(AHEAD_BYTES, filled["EDGE"] * x.shape[1] * x.itemsize),
        "GROUPS": held,
        "BLOCK": block,
    }
    return Launch(lay_out, cdiv(strips, block), arguments, WARPS_8)


def _one_scale(filled: dict[str, Any]) -> tuple[list[Launch], torch.Tensor]:
    x, count = filled["x_ptr"], filled["COUNT"]
    bits = torch.zeros(count, dtype=torch.int32, device=x.device)
    make = {**filled, "amax_ptr": bits.view(torch.float32)}
    launches = [
        covering(grouped_casts.amax_of_groups, {**filled, "amax_ptr": bits}, AMAX, WARPS_8),
        covering(grouped_casts.cast_groups_with_one, make, SQUARE, WARPS_8),
    ]
    return launches, bits


def _lines(filled: dict[str, Any]) -> tuple[list[Launch], torch.Tensor]:
    x = filled["x_ptr"]
    # One allocation; the amaxes of the columns begin at a multiple of 16 bytes.
    rows = 0 if filled["row_ptr"] is None else len(x) + -len(x) % 4
    counts = [rows, filled["COUNT"] * x.shape[1]]
    scratch = torch.zeros(sum(counts), dtype=torch.int32, device=x.device)
    row_bits, col_bits = scratch.split(counts)
    find = {**filled, **LINES_READ, "row_amax_ptr": None, "col_amax_ptr": col_bits}
    make = {**filled, "row_amax_ptr": None, "col_amax_ptr": col_bits.view(torch.float32)}
    if rows:
        find["row_amax_ptr"], make["row_amax_ptr"] = row_bits, row_bits.view(torch.float32)
    area = LINES[0] * LINES_READ["STEPS"], LINES[1]
    launches = [
        covering(grouped_casts.amax_of_group_lines, find, LINES, WARPS_4, area),
        covering(grouped_casts.cast_group_lines, make, CAST, WARPS_4),
    ]
    return launches, scratch


def _vectors(filled: dict[str, Any]) -> Launch:
    if is_paired(filled["x_ptr"], EDGE, filled["M"]):
        options = WARPS_8 if filled["row_ptr"] is None else {**WARPS_8, "maxnreg": PAIRED_REGISTERS}
        return covering(paired_casts.quantize_paired_vectors, filled, SQUARE, options)
    return covering(grouped_casts.quantize_group_vectors, filled, CAST, WARPS_4, SQUARE)


def _squares(filled: dict[str, Any]) -> Launch:
    edge = filled["EDGE"]
    if (
        filled["col_ptr"] is not None
        and edge in PAIRED_SQUARES
        and is_paired(filled["x_ptr"], edge, filled["M"])
    ):
        return covering(
            paired_casts.quantize_paired_squares, filled, (edge, PAIRED_SQUARE_COLS), WARPS_8, (edge, edge)
        )
    options = {**WARPS_8, "maxnreg": REGISTERS}
    return covering(grouped_casts.quantize_group_squares, filled, SQUARE, options, (edge, edge))
