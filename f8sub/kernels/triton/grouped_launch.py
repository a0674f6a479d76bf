"""Which kernels run over groups of rows, with which arguments, and the codes they fill."""

import functools
from typing import Any, NamedTuple

import torch

from f8sub.formats import ALL, Float8Format
from f8sub.kernels.groups import Codes, Groups, aligned_rows, empty_scale_inv, start_of_groups
from f8sub.kernels.triton import grouped_casts, pairs
from f8sub.kernels.triton.launch import (
    PAIRED_REGISTERS,
    PAIRED_SQUARE_COLS,
    PAIRED_SQUARES,
    REGISTERS,
    SQUARE,
    cast_to,
    cdiv,
    is_paired,
)
from f8sub.kernels.triton.launcher import Launch
from f8sub.kernels.triton.prepared import Made
from f8sub.kernels.triton.support import EDGE, EXPONENT_VECTOR, ROWWISE, VECTOR
from f8sub.kernels.triton.tiles import Shape

STRIP = 16
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

_shape = functools.cache(Shape)
_WARPS_4, _WARPS_8 = {"num_warps": 4}, {"num_warps": 8}


class Plan(NamedTuple):
    """The kernels that quantize a matrix of groups, in order, what they fill, and what they use.

    Attributes:
        launches: in order.
        rowwise: codes, None where not asked for.
        columnwise: the same.
        layout: how rows are laid out.
        table: of the strips.
        scratch: flat tensors that are zero before the first launch.
    """

    launches: list[Launch]
    rowwise: Codes | None
    columnwise: Codes | None
    layout: "Layout"
    table: torch.Tensor
    scratch: tuple[torch.Tensor, ...]

    @property
    def made(self) -> Made:
        """The launches with codes and scales of the usages, first rows and ends of what is laid out, and the table."""
        usages = [codes for codes in (self.rowwise, self.columnwise) if codes is not None]
        laid_out = list(self.layout.groups[:2]) if self.layout.is_stored else []
        results = [t for codes in usages for t in (codes.data, codes.scale_inv)]
        return Made(self.launches, [*results, *laid_out, self.table], self.scratch)


class Layout(NamedTuple):
    """Rows as kernels walk over them.

    Attributes:
        edge: rows of a strip.
        rows: as laid out.
        strips: entries of the table.
        groups: where groups are laid out; those of x where codes have its rows.
        is_stored: whether codes are laid out.
    """

    edge: int
    rows: int
    strips: int
    groups: Groups
    is_stored: bool

    @classmethod
    def of(cls, groups: Groups, edge: int, is_stored: bool) -> "Layout":
        """Groups laid out from multiples of ``edge`` on."""
        rows = aligned_rows(groups.rows, len(groups.ends), edge)
        strips = -(-rows // edge)
        if is_stored:
            first, ends = (torch.empty_like(groups.ends) for _ in range(2))
            groups = Groups(first, ends, rows)
        return cls(edge, rows, strips + -strips % WHOLE_STRIPS, groups, is_stored)


def quantization(
    x: torch.Tensor,
    groups: Groups,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    multiple: int = STRIP,
) -> Plan:
    """How to quantize groups that follow each other: ``groups.quantize`` for both usages.

    Args:
        x: (groups.rows, K), not empty, contiguous; float32, bfloat16 or float16; K a multiple of 16.
        groups: at least one, at most ``quantize_groups_cuda.MOST_GROUPS``.
        rowwise: a format that ``quantize_groups_cuda.why_no_kernel`` has no reason against; None to leave it out. One
            scale a row or a vector alone is for the kernels of a whole matrix.
        columnwise: the same format, or None.
        multiple: see ``groups.quantize``, a multiple of 16.
    """
    format = rowwise or columnwise
    if format is None:
        raise RuntimeError("asked to quantize for no usage")
    tile = format.tile
    is_square = tile.rows == tile.cols != ALL
    is_laid_out = is_square or columnwise is not None
    edge = start_of_groups(tile.cols, multiple) if is_laid_out else STRIP
    if not is_laid_out and tile == EXPONENT_VECTOR:
        edge = tile.cols
    layout = Layout.of(groups, edge, is_laid_out)
    row = None if rowwise is None else _rowwise(x, rowwise, layout.groups if is_square else groups)
    col = None if columnwise is None else _columnwise(x, columnwise, layout.groups)
    table = torch.empty(3 * layout.strips, dtype=torch.int32, device=x.device)
    filled = {
        "x_ptr": x,
        "strips_ptr": table,
        "STRIPS": layout.strips,
        "COUNT": len(groups.ends),
        "M": layout.rows,
        "N": x.shape[1],
        "LINES": groups.rows,
        "EDGE": edge,
        "CAST": cast_to(format),
        **_pointers(row, col),
    }
    launches, scratch = [_laying_out(groups, layout, table)], None
    if tile.is_whole:
        made, scratch = _one_scale(filled)
        launches += made
    elif tile == ROWWISE:
        made, scratch = _lines(filled, groups)
        launches += made
    elif tile == VECTOR:
        launches.append(_vectors(filled))
    elif tile == EXPONENT_VECTOR:
        launches.append(over(grouped_casts.quantize_group_exponents, filled, CAST, _WARPS_4))
    else:
        launches.append(_squares(filled))
    return Plan(launches, row, col, layout, table, () if scratch is None else (scratch,))


def _laying_out(groups: Groups, layout: Layout, table: torch.Tensor) -> Launch:
    count = len(groups.ends)
    held = max(16, 1 << (count - 1).bit_length())
    block = min(256, CELLS // held)
    arguments = {
        "ends_ptr": groups.ends,
        "strips_ptr": table,
        "first_ptr": layout.groups.first if layout.is_stored else None,
        "laid_ends_ptr": layout.groups.ends if layout.is_stored else None,
        "COUNT": count,
        "ROWS": groups.rows,
        "STRIPS": layout.strips,
        "EDGE": layout.edge,
        "GROUPS": held,
        "BLOCK": block,
    }
    return Launch(grouped_casts.lay_out, cdiv(layout.strips, block), arguments, _WARPS_8)


def _one_scale(filled: dict[str, Any]) -> tuple[list[Launch], torch.Tensor]:
    x, count = filled["x_ptr"], filled["COUNT"]
    bits = torch.zeros(count, dtype=torch.int32, device=x.device)
    make = {**filled, "amax_ptr": bits.view(torch.float32)}
    launches = [
        over(grouped_casts.amax_of_groups, {**filled, "amax_ptr": bits}, AMAX, _WARPS_8),
        over(grouped_casts.cast_groups_with_one, make, SQUARE, _WARPS_8),
    ]
    return launches, bits


def _lines(filled: dict[str, Any], groups: Groups) -> tuple[list[Launch], torch.Tensor]:
    x = filled["x_ptr"]
    # One allocation; the amaxes of the columns begin at a multiple of 16 bytes.
    rows = 0 if filled["row_ptr"] is None else groups.rows + -groups.rows % 4
    counts = [rows, filled["COUNT"] * x.shape[1]]
    scratch = torch.zeros(sum(counts), dtype=torch.int32, device=x.device)
    row_bits, col_bits = scratch.split(counts)
    find = {**filled, **LINES_READ, "row_amax_ptr": None, "col_amax_ptr": col_bits}
    make = {**filled, "row_amax_ptr": None, "col_amax_ptr": col_bits.view(torch.float32)}
    if rows:
        find["row_amax_ptr"], make["row_amax_ptr"] = row_bits, row_bits.view(torch.float32)
    area = LINES[0] * LINES_READ["STEPS"], LINES[1]
    launches = [
        over(grouped_casts.amax_of_group_lines, find, LINES, _WARPS_4, area),
        over(grouped_casts.cast_group_lines, make, CAST, _WARPS_4),
    ]
    return launches, scratch


def _vectors(filled: dict[str, Any]) -> Launch:
    if is_paired(filled["x_ptr"], EDGE, filled["M"]):
        options = _WARPS_8 if filled["row_ptr"] is None else {**_WARPS_8, "maxnreg": PAIRED_REGISTERS}
        return over(pairs.quantize_paired_vectors, filled, SQUARE, options)
    return over(grouped_casts.quantize_group_vectors, filled, CAST, _WARPS_4, SQUARE)


def _squares(filled: dict[str, Any]) -> Launch:
    edge = filled["EDGE"]
    if (
        filled["col_ptr"] is not None
        and edge in PAIRED_SQUARES
        and is_paired(filled["x_ptr"], edge, filled["M"])
    ):
        return over(pairs.quantize_paired_squares, filled, (edge, PAIRED_SQUARE_COLS), _WARPS_8, (edge, edge))
    options = {**_WARPS_8, "maxnreg": REGISTERS}
    return over(grouped_casts.quantize_group_squares, filled, SQUARE, options, (edge, edge))


def over(
    kernel: Any,
    arguments: dict[str, Any],
    tile: tuple[int, int],
    options: dict[str, int],
    area: tuple[int, int] | None = None,
) -> Launch:
    """A kernel that covers rows as laid out by one program an area, which it reads in tiles."""
    rows, cols = arguments["M"], arguments["N"]
    down, along = area or tile
    shape = _shape(*tile, rows % down == 0 and cols % along == 0)
    return Launch(kernel, cdiv(rows, down) * cdiv(cols, along), {**arguments, "TILE": shape}, options)


def _rowwise(x: torch.Tensor, format: Float8Format, groups: Groups) -> Codes:
    data = x.new_empty((groups.rows, x.shape[1]), dtype=format.dtype)
    return Codes(data, empty_scale_inv(x, format, groups, columnwise=False), groups)


def _columnwise(x: torch.Tensor, format: Float8Format, groups: Groups) -> Codes:
    data = x.new_empty((x.shape[1], groups.rows), dtype=format.dtype)
    return Codes(data, empty_scale_inv(x, format, groups, columnwise=True), groups)


def _pointers(row: Codes | None, col: Codes | None) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(("row_ptr", "row_scale_inv_ptr", "col_ptr", "col_scale_inv_ptr"))
    if row is not None:
        found.update(row_ptr=row.data.view(torch.uint8), row_scale_inv_ptr=_read(row.scale_inv))
    if col is not None:
        # Two rows' codes of a column are a word.
        found.update(col_ptr=col.data.view(torch.uint16), col_scale_inv_ptr=_read(col.scale_inv))
    return found


def _read(scale_inv: torch.Tensor) -> torch.Tensor:
    return scale_inv if scale_inv.dtype == torch.float32 else scale_inv.view(torch.uint8)
