"""Chooses the kernels that run over groups of rows and over all experts' weights, their arguments and results."""

from dataclasses import replace
from typing import Any

import torch

from f8sub.formats import MULTIPLE, Float8Format, Operand, Tile
from f8sub.kernels.grouped.operands import BOTH, EACH, RESULT, Computed, Gated, Taken
from f8sub.kernels.triton import quantize, quantize_bf16x2, quantize_grouped, quantize_one_pass
from f8sub.kernels.triton.launch import Launch, Launches
from f8sub.kernels.triton.quantize_grouped import RECORD, lay_out
from f8sub.kernels.triton.quantize_launch import (
    ELEMENTS,
    NOT_COMPUTED,
    PAIRED_REGISTERS,
    PAIRED_SQUARE_COLS,
    REGISTERS,
    SQUARE,
    WARPS_4,
    WARPS_8,
    cast_to,
    cdiv,
    covering,
    deriving,
    is_paired,
    operands,
    over,
    shape_of,
)
from f8sub.kernels.triton.support import EDGE, EXPONENT_VECTOR, PAIRED_SQUARES, ROWWISE, TENSORWISE, VECTOR

STRIP = MULTIPLE
"""Rows of a strip where codes of groups begin anywhere: as few as the fewest that columnwise codes are aligned to."""

WHOLE_STRIPS = 16
"""Tables have a multiple of so many strips, so that every tile of up to 256 rows has all of its strips in there."""

CELLS = 2048
"""Strips times groups that a program of ``lay_out`` compares: 8 registers of each of its threads."""

AMAX = 64, 256
"""Tiles of ``amax_of_groups``."""

LINES, LINES_READ = (STRIP, 256), {"STEPS": 32, "STAGES": 5}
"""Tiles of ``amax_of_group_lines``; one program reads 32 of them below each other, four ahead."""

CAST = 64, EDGE
"""Tiles of the kernels that cast with scales of lines: fewer rows, fewer tiles that are of two groups."""

AHEAD_BYTES, LEAST_BYTES = 5 * 2**20, 48 * 2**20
"""Casts in turn read so many bytes ahead. They are for matrices that have at least so many bytes as the second number.

L2 has 50 MiB on an H100, and an SM is near to half of them. They hold what was read of a group, what was read ahead,
and as many bytes of codes. A smaller matrix is in L2 as a whole when two launches read it.
"""

ONE_PASS_REGISTERS = 128
"""Of a thread that casts tokens in turn, by tiles that are squares: four programs of 4 warps on an SM.

Tiles of half as many rows are up to 18 % slower on an H200.
"""

GATED = 64, EDGE
"""Tiles of the same kernels where they compute SwiGLU, for which a thread holds twice or three times as much.

On an H200 those of 32 rows are a tenth to a quarter slower.
"""

GATED_REGISTERS = 128
"""Of a thread that computes SwiGLU's gradients, with scales of lines or vectors; and its result with those of vectors.

On an H200 80 take twice as long for the gradients.
"""

ONE_SCALE_REGISTERS = {RESULT: 80, EACH: 80}
"""The same with one scale per group; 96 for other gradients."""

GATED_SQUARE_COLS = 64
"""Columns of a square that 8 warps hold in registers where they compute SwiGLU."""


def quantization(  # noqa: PLR0913  (tokens, what they fill, and how groups lie)
    x: torch.Tensor,
    ends: torch.Tensor,
    row: Operand | None,
    col: Operand | None,
    edge: int,
    rows: int,
    laid_out: tuple[torch.Tensor, torch.Tensor] | None,
    computed: Computed | None = None,
) -> Launches:
    """Return how to quantize rows in groups that follow each other, for both usages.

    Args:
        x: (M, K), not empty, contiguous; float32, bfloat16 or float16; K a multiple of 16.
        ends: int32, of at least one group: the row after the last one of each.
        row: filled with rowwise data and scales; None to leave it out. One scale per row or a vector alone is for the
            kernels of a whole matrix.
        col: the same of columnwise ones, (K, rows), of the same format; one usage at least.
        edge: rows of a strip, a multiple of 16; groups are laid out from multiples of it on.
        rows: that groups laid out so take at most.
        laid_out: filled with the first row and the end of each group in the data; None where data have x's rows.
        computed: what is cast in place of x, which is its ``empty()`` then. Of ``Gated`` ``col`` is not None, and the
            dimensions of gate and ``rows`` are multiples of the edges of tiles.
    """
    format = next(made.format for made in (row, col) if made is not None)
    tile = format.tile
    strips = -(-rows // edge)
    strips += -strips % WHOLE_STRIPS
    is_of_groups = col is not None and edge % EDGE == 0 and (tile.is_whole or tile == ROWWISE)
    # In turn, where L2 would have lost the first rows before a second launch reads them.
    is_large = isinstance(computed, Gated) or x.nbytes >= LEAST_BYTES
    turns = rows // edge if is_of_groups and is_large and is_paired(x, EDGE, rows) else 0
    matrices = 1 if computed is None else computed.matrices
    zeros = _zeros(x, len(ends), tile, row is not None, turns > 0, matrices)
    counts = [3 * strips, 2 * RECORD.value * turns, *zeros]
    # One allocation for all int32 scratch; ``lay_out`` writes its zeros, so that nothing else is launched for them.
    table = torch.empty(sum(counts), dtype=torch.int32, device=x.device)
    of_strips, of_turns, done, of_rows, of_groups = table.split(counts)
    filled: dict[str, Any] = {
        **_given(x, computed),
        "ends_ptr": ends,
        "strips_ptr": of_strips,
        "turns_ptr": of_turns if turns else None,
        "zeros_ptr": table[sum(counts[:2]) :] if sum(zeros) else None,
        "done_ptr": done,
        "amax_ptr": of_groups,
        "row_amax_ptr": of_rows if len(of_rows) else None,
        "col_amax_ptr": of_groups,
        "STRIPS": strips,
        "TURNS": turns,
        "ZEROS": sum(zeros),
        "COUNT": len(ends),
        "M": rows,
        "N": x.shape[1],
        "LINES": len(x),
        "LOOKAHEAD": cdiv(AHEAD_BYTES, edge * (x.nbytes if computed is None else computed.nbytes) // len(x)),
        "EDGE": edge,
        "CAST": cast_to(format),
        **operands(row, col),
    }
    launches = [_laying_out(filled, laid_out)]
    if turns:
        launches.append(_one_pass(filled, tile.is_whole))
    elif tile.is_whole:
        launches += _one_scale(filled)
    elif tile == ROWWISE:
        launches += _lines(filled)
    elif tile == VECTOR:
        launches.append(_vectors(x, filled))
    elif tile == EXPONENT_VECTOR:
        launches.append(covering(quantize_grouped.quantize_group_exponents, filled, CAST, WARPS_4))
    else:
        launches.append(_squares(x, filled))
    results = [tensor for made in (row, col) if made is not None for tensor in (made.data, made.scale_inv)]
    return Launches(launches, [*results, *(laid_out or ()), table], ())


def _given(x: torch.Tensor, computed: Computed | None) -> dict[str, Any]:
    if computed is None:
        return {**NOT_COMPUTED, "x_ptr": x}
    if isinstance(computed, Taken):
        taken = {"x_ptr": computed.x, "index_ptr": computed.rows, "factor_ptr": computed.factors}
        return {**NOT_COMPUTED, **taken}
    return {
        **NOT_COMPUTED,
        "x_ptr": computed.dh,
        "gate_ptr": computed.gate,
        "up_ptr": computed.up,
        "GATE_WIDTH": computed.gate.shape[1],
        "GATE_STRIDE": computed.gate.stride(0),
        "SIDE": computed.side,
    }


def _zeros(
    x: torch.Tensor, count: int, tile: Tile, has_rows: bool, in_one_pass: bool, matrices: int
) -> list[int]:
    """Return how many numbers are zero before a cast: those that count what is done, amaxes of rows, and of groups.

    Each kind begins at a multiple of 16 bytes.
    """
    if tile.is_whole:
        found = count * in_one_pass, 0, matrices * count
    elif tile == ROWWISE:
        found = count * in_one_pass, matrices * len(x) * has_rows, matrices * count * x.shape[1]
    else:
        found = 0, 0, 0
    return [number + -number % 4 for number in found]


def _one_pass(filled: dict[str, Any], is_whole: bool) -> Launch:
    """Return the launch for amaxes and casts in one."""
    kernel = (
        quantize_one_pass.quantize_groups_one_pass
        if is_whole
        else quantize_one_pass.quantize_group_lines_one_pass
    )
    rows, cols = SQUARE if filled["gate_ptr"] is None else GATED
    programs = 2 * filled["TURNS"] * (filled["EDGE"] // rows) * (_across(filled) // cols)
    # Occupancy first: programs that wait for amaxes hold their registers.
    options = {**WARPS_4, "maxnreg": ONE_PASS_REGISTERS}
    if filled["gate_ptr"] is not None:
        options["maxnreg"] = GATED_REGISTERS
        if is_whole or filled["SIDE"] == RESULT:
            options["maxnreg"] = ONE_SCALE_REGISTERS.get(filled["SIDE"], 96)
    return Launch(kernel, programs, {**filled, "TILE": shape_of(rows, cols, True)}, options)


def _laying_out(filled: dict[str, Any], laid_out: tuple[torch.Tensor, torch.Tensor] | None) -> Launch:
    count, strips = filled["COUNT"], filled["STRIPS"]
    # Triton's tensors have powers of two as sizes.
    held = max(16, 1 << (count - 1).bit_length())
    block = min(256, CELLS // held)
    first, laid_ends = laid_out or (None, None)
    arguments = {
        **filled,
        "first_ptr": first,
        "laid_ends_ptr": laid_ends,
        "ROWS": filled["LINES"],
        "GROUPS": held,
        "BLOCK": block,
    }
    return Launch(lay_out, cdiv(strips, block), arguments, WARPS_8)


def _one_scale(filled: dict[str, Any]) -> list[Launch]:
    make = {**filled, "amax_ptr": filled["amax_ptr"].view(torch.float32)}
    return [
        covering(quantize_grouped.amax_of_groups, filled, AMAX, WARPS_8),
        covering(quantize_grouped.cast_groups_with_one, make, SQUARE, WARPS_8),
    ]


def _lines(filled: dict[str, Any]) -> list[Launch]:
    find, make = {**filled, **LINES_READ}, dict(filled)
    for name in ("row_amax_ptr", "col_amax_ptr"):
        make[name] = None if filled[name] is None else filled[name].view(torch.float32)
    area = LINES[0] * LINES_READ["STEPS"], LINES[1]
    return [
        covering(quantize_grouped.amax_of_group_lines, find, LINES, WARPS_4, area),
        covering(quantize.cast_with_lines, make, CAST, WARPS_4),
    ]


def _across(filled: dict[str, Any]) -> int:
    """Return the columns that programs are for: of gate alone where each has the tile of up, too."""
    found: int = filled["GATE_WIDTH"] if filled["SIDE"] in (BOTH, EACH) else filled["N"]
    return found


def _covering_pairs(
    kernel: Any,
    filled: dict[str, Any],
    tile: tuple[int, int],
    options: dict[str, int],
    area: tuple[int, int],
) -> Launch:
    found = covering(kernel, filled, tile, options, area)
    return found._replace(programs=(filled["M"] // area[0]) * (_across(filled) // area[1]))


def _vectors(x: torch.Tensor, filled: dict[str, Any]) -> Launch:
    if is_paired(x, EDGE, filled["M"]):
        most = PAIRED_REGISTERS if filled["gate_ptr"] is None else GATED_REGISTERS
        options = WARPS_8 if filled["row_ptr"] is None else {**WARPS_8, "maxnreg": most}
        return _covering_pairs(quantize_bf16x2.quantize_paired_vectors, filled, SQUARE, options, SQUARE)
    return covering(quantize.quantize_crossing_vectors, filled, CAST, WARPS_4, SQUARE)


def _squares(x: torch.Tensor, filled: dict[str, Any]) -> Launch:
    edge = filled["EDGE"]
    if filled["col_ptr"] is not None and edge in PAIRED_SQUARES and is_paired(x, edge, filled["M"]):
        tile = edge, PAIRED_SQUARE_COLS if filled["gate_ptr"] is None else GATED_SQUARE_COLS
        return _covering_pairs(quantize_bf16x2.quantize_paired_squares, filled, tile, WARPS_8, (edge, edge))
    options = {**WARPS_8, "maxnreg": REGISTERS}
    return covering(quantize_grouped.quantize_group_squares, filled, SQUARE, options, (edge, edge))


ONE_PASS_ELEMENTS = 8192
"""Elements that one program of ``quantize_experts_one_pass`` reads."""

ONE_PASS_BYTES = 6 * 2**20
"""The most that an expert's weight has if it is cast in turn; all of them together have at least ``LEAST_BYTES``."""


def weight_quantization(w: torch.Tensor, made: Operand) -> Launches:
    """Return how to quantize the weights of all experts, whose tiles begin again in every one.

    Args:
        w: (E, N, K), not empty; each expert's matrix is contiguous.
        made: filled, (E, N, K) and (E, n, k), contiguous: one scale per expert, or squares of whole 128s.
    """
    format = made.format
    if format.tile.is_whole:
        return _one_scale_of_weights(w, made)
    edge = format.tile.rows
    arguments: dict[str, Any] = {
        "x_ptr": w,
        "row_ptr": made.data.view(torch.uint8),
        "row_scale_inv_ptr": made.scale_inv,
        "col_ptr": None,
        "col_scale_inv_ptr": None,
        "STRIDE": w.stride(0),
        "CAST": cast_to(format),
        "EDGE": edge,
    }
    options = {**WARPS_8, "maxnreg": REGISTERS}
    launches = [over(w, (edge, edge), quantize.quantize_squares, arguments, options, SQUARE)]
    return Launches(launches, made[:2], ())


def quantization_of_stacked_weights(x: torch.Tensor, format: Float8Format) -> Launches:
    """Return how to quantize rowwise a matrix, (M, K), of which one scale serves so many whole rows, and no others."""
    experts = x.unflatten(0, (-1, format.tile.rows))
    data = experts.new_empty(experts.shape, dtype=format.dtype)
    scale_inv = experts.new_empty((len(experts), 1, 1), dtype=torch.float32)
    found = weight_quantization(experts, Operand(data, scale_inv, replace(format, tile=TENSORWISE)))
    return found._replace(results=[data.view(x.shape), scale_inv.view(-1, 1)])


def weight_derivation(rowwise: Operand, derived: Operand) -> Launches:
    """Return how to derive the columnwise data and scales of all experts from their rowwise ones.

    Args:
        rowwise: (E, N, K), contiguous, N and K even; one scale per expert, squares, or one scale per row.
        derived: filled, (E, K, N), contiguous; its tiles are those of ``rowwise`` transposed, or both have one scale
            per row.
    """
    launches, scratch = deriving(rowwise, derived)
    return Launches(launches, derived[:2], scratch)


def _one_scale_of_weights(w: torch.Tensor, made: Operand) -> Launches:
    count, rows, cols = w.shape
    size = rows * cols
    # Small enough for L2 to keep a matrix until it is cast, and in all too large for L2 to keep everything.
    if LEAST_BYTES <= w.nbytes <= ONE_PASS_BYTES * count:
        return _one_scale_of_weights_in_one_pass(w, made)
    bits = torch.zeros(count, dtype=torch.int32, device=w.device)
    block = {"SIZE": size, "STRIDE": w.stride(0), "BLOCK": ELEMENTS, "WHOLE": size % ELEMENTS == 0}
    programs = count * cdiv(size, ELEMENTS)
    make = {
        "amax_ptr": bits.view(torch.float32),
        "row_ptr": made.data.view(torch.uint8),
        "row_scale_inv_ptr": made.scale_inv,
        "CAST": cast_to(made.format),
    }
    find = {"x_ptr": w, "amax_ptr": bits, "prior_ptr": None, **block}
    launches = [
        Launch(quantize.amax_of_matrix, programs, find, WARPS_8),
        Launch(quantize.cast_experts, programs, {"x_ptr": w, **make, **block}, WARPS_8),
    ]
    return Launches(launches, made[:2], (bits,))


def _one_scale_of_weights_in_one_pass(w: torch.Tensor, made: Operand) -> Launches:
    count, rows, cols = w.shape
    size = rows * cols
    # Both parts begin at multiples of 16 bytes.
    bits = torch.zeros(2 * (count + -count % 4), dtype=torch.int32, device=w.device)
    done, amax = bits.chunk(2)
    arguments = {
        "x_ptr": w,
        "done_ptr": done,
        "amax_ptr": amax,
        "row_ptr": made.data.view(torch.uint8),
        "row_scale_inv_ptr": made.scale_inv,
        "EXPERTS": count,
        "LOOKAHEAD": min(cdiv(AHEAD_BYTES, size * w.itemsize), count - 1),
        "SIZE": size,
        "STRIDE": w.stride(0),
        "CAST": cast_to(made.format),
        "BLOCK": ONE_PASS_ELEMENTS,
        "WHOLE": size % ONE_PASS_ELEMENTS == 0,
    }
    programs = 2 * count * cdiv(size, ONE_PASS_ELEMENTS)
    launches = [Launch(quantize_one_pass.quantize_experts_one_pass, programs, arguments, WARPS_4)]
    return Launches(launches, made[:2], (bits,))
