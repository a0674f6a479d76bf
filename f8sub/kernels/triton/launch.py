"""Which kernels run over a matrix, with which arguments, and the operands they fill."""

from typing import Any, NamedTuple

import torch
import triton.language as tl

from f8sub.formats import ALL, Float8Format, Operand
from f8sub.kernels.gemm.block_scales import empty_scale_inv
from f8sub.kernels.scales import PriorScale
from f8sub.kernels.triton import blocks, casts, paired, quantize_cuda
from f8sub.kernels.triton.launcher import Launch
from f8sub.kernels.triton.quantize_cuda import EDGE, ROWWISE, TENSORWISE, VECTOR

REGISTERS = 128
"""Of a thread, the most with which an SM holds two programs of 8 warps."""

ELEMENTS = 16384
"""What one program of ``amax_of_matrix`` reads: as much as the others' tiles have."""

ROW_PART = 2048
"""What one step of ``quantize_rows`` reads of a row."""

LINES = {"ROWS": 32, "COLS": 256, "STEPS": 16, "STAGES": 3}
"""Of ``amax_of_lines``: one program looks through 16 tiles below each other, two of them on their way."""

LINE_ROWS = 64
"""Height of the tiles of ``cast_with_lines``."""

VECTOR_PART, VECTOR_WARPS = 64, 4
"""Rows that ``quantize_crossing_vectors`` takes at a time, and its warps.

On an H200 128 rows by 4 warps were a quarter slower, of whole tiles with float32 scales, which are made of pairs now.
"""

PAIRED_REGISTERS = 80
"""Of a thread of ``quantize_paired_vectors``, for 3 programs an SM.

For columns alone it needs fewer registers, if no number is given.
"""

PAIRED_SQUARES, PAIRED_SQUARE_COLS = (128, 256), 128
"""Edges of squares of pairs, and how many of their columns 8 warps hold in registers, so that an SM has two programs.

On an H200 a tenth to a seventh faster for squares of 256 than all columns in 16 warps.
"""

AT_A_TIME = 264
"""Programs of ``quantize_vectors`` that read the next tile while they cast one: two for each SM of an H200."""

PART_ROWS = 64
"""Height of the tiles of ``cast_part``."""

INPUTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
CODES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


class Plan(NamedTuple):
    """The kernels that quantize one matrix, in order, and the operands that they fill."""

    launches: list[Launch]
    row: Operand | None
    col: Operand | None


def quantization(
    x: torch.Tensor,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    amax: torch.Tensor | None = None,
) -> Plan:
    """How to quantize a matrix with scales of its own current amax: ``reference.quantize``.

    Args:
        x: (M, N), not empty, contiguous; float32, bfloat16 or float16.
        rowwise: format that ``quantize_cuda.why_no_kernel`` has no reason against; None to leave the usage out.
        columnwise: likewise. One that differs from ``rowwise`` is quantized by itself.
        amax: float32, (1, 1), of the finite elements, where it is known and both formats have one scale a matrix.
    """
    if rowwise is not None and columnwise is not None and not _in_one_launch(x, rowwise, columnwise):
        row, col = quantization(x, rowwise, None), quantization(x, None, columnwise)
        return Plan(row.launches + col.launches, row.row, col.col)
    format = _one(rowwise, columnwise)
    row_operand = None if rowwise is None else empty(x, rowwise, *x.shape)
    col_operand = None if columnwise is None else empty(x, columnwise, *x.shape[::-1])
    if format.tile == TENSORWISE:
        launches = _one_scale(x, format, row_operand, col_operand, amax)
    elif format.tile == ROWWISE and columnwise is None:
        launches = [_quantize_rows(x, format, row_operand)]
    elif format.tile == ROWWISE:
        launches = _lines(x, format, row_operand, col_operand)
    else:
        launches = [_blocks(x, format, row_operand, col_operand)]
    return Plan(launches, row_operand, col_operand)


def quantization_with_prior(
    x: torch.Tensor, prior: PriorScale, rowwise: Float8Format | None, columnwise: Float8Format | None
) -> tuple[Plan, torch.Tensor]:
    """How to quantize a matrix with one prior scale: ``reference.quantize``.

    Args:
        x: see ``quantization``.
        prior: the scale; one element.
        rowwise: a format with one scale a matrix; None to leave the usage out.
        columnwise: likewise, equal to ``rowwise`` where both are given.

    Returns:
        The plan, and what becomes the largest magnitude: float32, (1, 1).
    """
    format = _one(rowwise, columnwise)
    row = None if rowwise is None else empty(x, rowwise, *x.shape)
    col = None if columnwise is None else empty(x, columnwise, *x.shape[::-1])
    # A prior scale that is there and stays as it is needs no amax.
    needs_amax = prior.covers or not prior.is_known
    largest, *bits = torch.zeros(1 + needs_amax, 1, 1, dtype=torch.int32, device=x.device).unbind()
    launches = [_amax_of_matrix(x, bits[0], None if prior.covers else prior.scale)] if needs_amax else []
    amax = bits[0].view(torch.float32) if needs_amax else None
    launches.append(_cast_with_one(x, format, row, col, amax, prior, largest))
    return Plan(launches, row, col), largest.view(torch.float32)


def staging(amax: torch.Tensor, staged: torch.Tensor, met: torch.Tensor) -> Launch:
    """How to take an amax into staged ones: ``scales.stage``."""
    arguments = {"amax_ptr": amax, "staged_ptr": staged, "met_ptr": met}
    return Launch(casts.stage_amax, 1, arguments, {"num_warps": 1})


def part_cast(
    x: torch.Tensor,
    scale: torch.Tensor,
    format: Float8Format,
    offset: tuple[int, int],
    through: torch.dtype,
    out: torch.Tensor,
) -> Launch:
    """How to cast a part of a matrix with scales that are known: ``reference.cast`` with ``reference.spread`` ones.

    Args:
        x: (M, N), see ``quantization``.
        scale: float32, those of all tiles of the matrix that ``format`` has; adjacent in a row.
        format: one whose tiles are all columns, or whole ``EDGE``s of them.
        offset: where in the matrix the part begins; the column at a whole ``EDGE`` unless tiles are all columns.
        through: dtype to round ``x`` to first.
        out: uint8, (M, N), adjacent in a row.
    """
    rows, cols = (None if edge == ALL else edge for edge in (format.tile.rows, format.tile.cols))
    arguments = {
        "x_ptr": x,
        "scale_ptr": scale,
        "out_ptr": out,
        "OUT_STRIDE": out.stride(0),
        "SCALE_STRIDE": scale.stride(0),
        "first_row": offset[0],
        "first_col": offset[1],
        "TILE_ROWS": rows,
        "TILE_COLS": cols,
        "TOP": format.max,
        "CODES": CODES[format.dtype],
        "THROUGH": INPUTS[through],
        **tiles_of(x, PART_ROWS, EDGE),
    }
    return Launch(casts.cast_part, programs_of(x, PART_ROWS, EDGE), arguments)


def _in_one_launch(x: torch.Tensor, rowwise: Float8Format, columnwise: Float8Format) -> bool:
    """Whether one kernel makes both usages.

    ptxas 12.8 crashes on what Triton 3.6 makes of squares of one row.
    """
    return rowwise == columnwise and x.shape[0] > 1


def is_paired(x: torch.Tensor, edge: int) -> bool:
    """Whether kernels of pairs take a matrix: bfloat16 that begins at a whole word, of whole (edge, edge) tiles."""
    is_whole = x.shape[0] % edge == 0 and x.shape[1] % edge == 0
    in_words = x.dtype == torch.bfloat16 and x.data_ptr() % 4 == 0
    return is_whole and in_words and quantize_cuda.compares_pairs(x.device)


def of_pairs(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of a kernel of pairs: all of its tiles are whole, and TOP says what it casts to."""
    left_out = ("WHOLE", "CODES")
    return {name: value for name, value in arguments.items() if name not in left_out}


def _one(rowwise: Float8Format | None, columnwise: Float8Format | None) -> Float8Format:
    format = rowwise or columnwise
    if format is None:
        raise RuntimeError("asked to quantize for no usage")
    return format


def empty(like: torch.Tensor, format: Float8Format, rows: int, depth: int) -> Operand:
    """A (rows, depth) operand for kernels to fill."""
    data = like.new_empty((rows, depth), dtype=format.dtype)
    return Operand(data, empty_scale_inv(like, format, rows, depth), format)


def cdiv(a: int, b: int) -> int:
    """Ceiling division. Not ``triton.cdiv``, whose wrapper keeps the host longer than an allocation does."""
    return -(-a // b)


def programs_of(x: torch.Tensor, rows: int, cols: int) -> int:
    """How many tiles of (rows, cols) there are."""
    return cdiv(x.shape[0], rows) * cdiv(x.shape[1], cols)


def tiles_of(x: torch.Tensor, rows: int, cols: int) -> dict[str, Any]:
    """Arguments of kernels that work on tiles of (rows, cols)."""
    whole = x.shape[0] % rows == 0 and x.shape[1] % cols == 0
    return {"M": x.shape[0], "N": x.shape[1], "ROWS": rows, "COLS": cols, "WHOLE": whole}


def rule(format: Float8Format) -> dict[str, Any]:
    """Arguments of kernels that cast."""
    return {
        "TOP": format.max,
        "CODES": CODES[format.dtype],
        "POWER_OF_2": format.scale_rule.is_power_of_2,
    }


def operands(row: Operand | None, col: Operand | None) -> dict[str, Any]:
    """Arguments of kernels that fill operands."""
    found: dict[str, Any] = dict.fromkeys(("row_ptr", "row_scale_inv_ptr", "col_ptr", "col_scale_inv_ptr"))
    if row is not None:
        found.update(row_ptr=row.data.view(torch.uint8), row_scale_inv_ptr=row.scale_inv)
    if col is not None:
        # Two rows' codes of a column are a word, where no word holds codes of two columns.
        words = torch.uint16 if col.data.shape[1] % 2 == 0 else torch.uint8
        found.update(col_ptr=col.data.view(words), col_scale_inv_ptr=col.scale_inv)
    return found


def _one_scale(
    x: torch.Tensor,
    format: Float8Format,
    row: Operand | None,
    col: Operand | None,
    amax: torch.Tensor | None,
) -> list[Launch]:
    if amax is not None:
        return [_cast_with_one(x, format, row, col, amax)]
    bits = torch.zeros(1, dtype=torch.int32, device=x.device)
    cast = _cast_with_one(x, format, row, col, bits.view(torch.float32))
    return [_amax_of_matrix(x, bits, None), cast]


def _amax_of_matrix(x: torch.Tensor, amax: torch.Tensor, prior: torch.Tensor | None) -> Launch:
    """``amax`` is int32, zero; where ``prior`` is a scale that is not 0 it is left so."""
    arguments = {
        "x_ptr": x,
        "amax_ptr": amax,
        "prior_ptr": prior,
        "SIZE": x.numel(),
        "BLOCK": ELEMENTS,
        "WHOLE": x.numel() % ELEMENTS == 0,
    }
    return Launch(casts.amax_of_matrix, cdiv(x.numel(), ELEMENTS), arguments)


def _cast_with_one(
    x: torch.Tensor,
    format: Float8Format,
    row: Operand | None,
    col: Operand | None,
    amax: torch.Tensor | None,
    prior: PriorScale | None = None,
    largest: torch.Tensor | None = None,
) -> Launch:
    arguments = {
        "x_ptr": x,
        "amax_ptr": amax,
        "prior_ptr": None if prior is None else prior.scale,
        "largest_ptr": largest,
        **operands(row, col),
        **rule(format),
        "HEADROOM": 1.0 if prior is None else 2.0**prior.margin,
        "COVERS": prior is not None and prior.covers,
        **tiles_of(x, EDGE, EDGE),
    }
    if prior is not None and col is not None and is_paired(x, EDGE):
        return Launch(paired.cast_pairs_with_prior, programs_of(x, EDGE, EDGE), of_pairs(arguments))
    return Launch(casts.cast_with_one, programs_of(x, EDGE, EDGE), arguments)


def zeroed(counts: dict[str, int], device: torch.device) -> dict[str, torch.Tensor | None]:
    """Zeros for so many maxima of amaxes' bits, int32, each name's from a multiple of 16 bytes on; None for none."""
    padded = [count + -count % 4 for count in counts.values()]
    parts = torch.zeros(sum(padded), dtype=torch.int32, device=device).split(padded)
    return {name: part if part.numel() else None for name, part in zip(counts, parts, strict=True)}


def as_amaxes(found: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """What ``zeroed`` made, once it was filled, float32."""
    return {name: None if bits is None else bits.view(torch.float32) for name, bits in found.items()}


def _lines(x: torch.Tensor, format: Float8Format, row: Operand | None, col: Operand | None) -> list[Launch]:
    counts = {"row_amax_ptr": 0 if row is None else x.shape[0], "col_amax_ptr": x.shape[1]}
    found = zeroed(counts, x.device)
    height = LINES["ROWS"] * LINES["STEPS"]
    find = {"x_ptr": x, **found, **tiles_of(x, height, LINES["COLS"]), **LINES}
    make = {
        "x_ptr": x,
        **as_amaxes(found),
        **operands(row, col),
        **rule(format),
        **tiles_of(x, LINE_ROWS, EDGE),
    }
    options = {"num_warps": 4}
    return [
        Launch(casts.amax_of_lines, programs_of(x, height, LINES["COLS"]), find, options),
        Launch(casts.cast_with_lines, programs_of(x, LINE_ROWS, EDGE), make, options),
    ]


def _quantize_rows(x: torch.Tensor, format: Float8Format, row: Operand | None) -> Launch:
    made = operands(row, None)
    arguments = {
        "x_ptr": x,
        "row_ptr": made["row_ptr"],
        "row_scale_inv_ptr": made["row_scale_inv_ptr"],
        **rule(format),
        "N": x.shape[1],
        "PART": ROW_PART,
        "WHOLE": x.shape[1] % ROW_PART == 0,
    }
    return Launch(casts.quantize_rows, x.shape[0], arguments)


def _blocks(x: torch.Tensor, format: Float8Format, row: Operand | None, col: Operand | None) -> Launch:
    edge = format.tile.cols
    arguments = {
        "x_ptr": x,
        **operands(row, col),
        "M": x.shape[0],
        "N": x.shape[1],
        **rule(format),
        "EDGE": edge,
        "WHOLE": x.shape[0] % edge == 0 and x.shape[1] % edge == 0,
    }
    programs = programs_of(x, edge, edge)
    if col is not None and is_paired(x, edge):
        pairs = of_pairs(arguments)
        if format.tile == VECTOR:
            options = {"num_warps": 8}
            if row is not None:
                options["maxnreg"] = PAIRED_REGISTERS
            return Launch(paired.quantize_paired_vectors, programs, pairs, options)
        if edge in PAIRED_SQUARES:
            pairs["COLS"] = PAIRED_SQUARE_COLS
            return Launch(paired.quantize_paired_squares, programs, pairs)
    if format.tile != VECTOR:
        arguments["PART"], options = EDGE, {"num_warps": 8, "maxnreg": REGISTERS}
        return Launch(blocks.quantize_squares, programs, arguments, options)
    if col is None:
        # A program that reads ahead pays where nothing is transposed in shared memory.
        rows_only = {name: value for name, value in arguments.items() if not name.startswith("col_")}
        rows_only["STAGES"] = 3
        return Launch(blocks.quantize_vectors, min(programs, AT_A_TIME), rows_only)
    arguments["PART"] = VECTOR_PART
    return Launch(blocks.quantize_crossing_vectors, programs, arguments, {"num_warps": VECTOR_WARPS})
