"""Chooses the kernels that run over a matrix, or over parts of weights for the wire, their arguments and results.

SliceCasts are cast with scales that are known: one by a launch, or many.
"""

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl

from f8sub.formats import ALL, Float8Format, Operand, share_scale
from f8sub.host_copy import sent_to
from f8sub.kernels.gemm.block_scales import empty_scale_inv
from f8sub.kernels.scales import PriorScale
from f8sub.kernels.triton import quantize, quantize_bf16x2, support, transpose
from f8sub.kernels.triton.launch import Launch, Launches, prepare
from f8sub.kernels.triton.prepared import PreparedLaunches
from f8sub.kernels.triton.support import ALIGNMENT, EDGE, ROWWISE, VECTOR, ShardSlice
from f8sub.kernels.triton.tile_ops import Cast, Shape

SQUARE = EDGE, EDGE

REGISTERS = 128
"""The most registers of a thread with which an SM holds two programs of 8 warps."""

ELEMENTS = 16384
"""Elements that one program of ``amax_of_matrix`` reads: as many as the tiles of other kernels have."""

ROW_PART = 2048
"""Elements of a row that one step of ``quantize_rows`` reads."""

WHOLE_ROWS = 4096
"""Elements of a tile of ``quantize_whole_rows``, which takes rows of at most ``ROW_PART``.

``quantize_rows`` issues as many instructions for a row of 768 as for one of 2048, more than memory takes time for.
"""

LINES, LINES_READ = (32, 256), {"STEPS": 16, "STAGES": 3}
"""Tiles of ``amax_of_lines``; one program reads 16 of them below each other, two ahead."""

CODE_LINES, CODE_LINES_READ = (16, 256), {"STEPS": 32, "STAGES": 4}
"""The same for ``amax_of_code_columns``: codes are half as large as bf16, so that as many bytes are on their way."""

CAST_LINES = 64, EDGE
"""Tiles of ``cast_with_lines``."""

CROSSING_ROWS, CROSSING_WARPS = 64, 4
"""Rows that ``quantize_crossing_vectors`` takes at a time, and its warps.

On an H200 128 rows by 4 warps were a quarter slower for whole tiles with float32 scales, which pairs serve now.
"""

PAIRED_REGISTERS = 80
"""Registers of a thread of ``quantize_paired_vectors``, for 3 programs an SM.

For columns alone the kernel needs fewer registers if no number is given.
"""

PAIRED_SQUARE_COLS = 128
"""Columns of a square of pairs that 8 warps hold in registers, so that an SM has two programs.

On an H200 this is a tenth to a seventh faster for squares of 256 than all columns in 16 warps.
"""

AT_A_TIME = 264
"""Programs of ``quantize_vectors`` that read the next tile while they cast one: two for each SM of an H200."""

INPUTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
CODES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
_CASTS = {
    (dtype, power_of_2): Cast(torch.finfo(dtype).max, codes, power_of_2)
    for dtype, codes in CODES.items()
    for power_of_2 in (False, True)
}
shape_of = functools.cache(Shape)
WARPS_4, WARPS_8 = {"num_warps": 4}, {"num_warps": 8}

NOT_COMPUTED: dict[str, Any] = dict.fromkeys(
    ("index_ptr", "factor_ptr", "gate_ptr", "up_ptr", "GATE_WIDTH", "GATE_STRIDE", "SIDE")
)
"""Arguments of kernels that cast a matrix as it lies in memory, and neither ``Taken`` nor ``Gated``."""


class QuantizeLaunches(NamedTuple):
    """The kernels that quantize one matrix, in order, and what they fill, see ``reference.Quantized``.

    ``scratch`` are flat tensors that are zero before the first of them.
    """

    launches: list[Launch]
    rowwise: Operand | None
    columnwise: Operand | None
    amax: torch.Tensor | None = None
    scratch: tuple[torch.Tensor, ...] = ()

    @property
    def made(self) -> Launches:
        """The launches with codes and scales of the operands, in order, and each tensor once."""
        operands = [operand for operand in (self.rowwise, self.columnwise) if operand is not None]
        tensors = dict.fromkeys(t for each in operands for t in (each.data, each.scale_inv))
        return Launches(self.launches, list(tensors), self.scratch)


def quantization(
    x: torch.Tensor,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    prior: PriorScale | None = None,
    amax: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
) -> QuantizeLaunches:
    """Return how to quantize a matrix: ``reference.quantize``.

    Args:
        x: (M, N), not empty, contiguous; float32, bfloat16 or float16.
        rowwise: format that ``support.why_no_kernel`` has no reason against; None to leave the usage out.
        columnwise: the same. One that differs from ``rowwise`` is quantized by itself.
        prior: see ``reference.quantize``; then formats that are both given are equal.
        amax: float32, (1, 1), of the finite elements, where it is known and both formats have one scale per matrix.
        zero: int32, (1,), memory that is 0 before the first launch and becomes the amax of one that is not known; of
            its own where it is None.
    """
    # ptxas 12.8 crashes on what Triton 3.6 makes of squares of one row for both usages.
    one_scale = share_scale(rowwise, columnwise)
    in_one_launch = prior is not None or one_scale or (rowwise == columnwise and x.shape[0] > 1)
    if rowwise is not None and columnwise is not None and not in_one_launch:
        row, col = quantization(x, rowwise, None), quantization(x, None, columnwise)
        scratch = row.scratch + col.scratch
        return QuantizeLaunches(row.launches + col.launches, row.rowwise, col.columnwise, scratch=scratch)
    format = rowwise or columnwise
    if format is None:
        raise RuntimeError("asked to quantize for no usage")
    row_operand = None if rowwise is None else _empty(x, rowwise, *x.shape)
    # rowwise (M, N), columnwise (N, M)
    col_operand = None if columnwise is None else _empty(x, columnwise, *x.shape[::-1])
    # One allocation less for the host; both usages are handed the same address.
    if one_scale and row_operand is not None and col_operand is not None:
        col_operand = col_operand._replace(scale_inv=row_operand.scale_inv)
    filled = {"x_ptr": x, **operands(row_operand, col_operand), "CAST": cast_to(format)}
    largest, scratch = None, ()
    if format.tile.is_whole:
        launches, largest, scratch = _one_scale(x, filled, prior, amax, zero)
    elif format.tile == ROWWISE:
        launches, scratch = _lines(x, filled)
    else:
        launches = [_vectors(x, filled) if format.tile == VECTOR else _squares(x, filled, format.tile.rows)]
    return QuantizeLaunches(launches, row_operand, col_operand, largest, scratch)


def staging(amax: torch.Tensor, staged: torch.Tensor, met: torch.Tensor) -> Launch:
    """Return how to take an amax into staged ones: ``cuda.stage``."""
    arguments = {"amax_ptr": amax, "staged_ptr": staged, "met_ptr": met}
    return Launch(quantize.stage_amax, 1, arguments, {"num_warps": 1})


def derivation(rowwise: Operand, columnwise: Float8Format) -> QuantizeLaunches:
    """Return how to derive the columnwise operand from rowwise data: ``reference.derive_columnwise``.

    The data are not empty and contiguous. The tiles of ``columnwise`` are those of ``rowwise`` transposed, for data
    that ``transposition`` takes; or both have one scale per row, or one per vector. Of the former, scales are
    contiguous.
    """
    col = _empty(rowwise.data, columnwise, *rowwise.data.shape[::-1])
    launches, scratch = deriving(rowwise, col)
    return QuantizeLaunches(launches, None, col, scratch=scratch)


def deriving(rowwise: Operand, col: Operand) -> tuple[list[Launch], tuple[torch.Tensor, ...]]:
    """Return the launches that fill ``col``, and scratch memory; of one matrix or of all experts'."""
    codes, scale_inv, format, _ = rowwise
    if format.tile.is_transpose_of(col.format.tile):
        # Square tiles: the same bytes and scales, transposed, so nothing is rounded again.
        return [transposition(codes, col.data, scale_inv, col.scale_inv, col.format.tile.cols)], ()
    arguments = {
        "codes_ptr": codes.view(torch.uint8),
        "scale_inv_ptr": scale_inv,
        "SCALE_STRIDE": scale_inv.stride(-2),
        "SOURCE": CODES[format.dtype],
        **operands(None, col),
        "CAST": cast_to(col.format),
    }
    if format.tile == VECTOR:
        arguments["BLOCK_STRIDE"] = scale_inv.stride(1)
        # Each square has the amaxes of its own columns, so one launch finds and casts.
        return [over(codes, SQUARE, transpose.requantize_vectors, arguments, WARPS_8)], ()
    amax = torch.zeros(codes.numel() // codes.shape[-2], dtype=torch.int32, device=codes.device)
    find = {**arguments, **CODE_LINES_READ, "col_amax_ptr": amax}
    arguments["col_amax_ptr"] = amax.view(torch.float32)
    area = CODE_LINES[0] * CODE_LINES_READ["STEPS"], CODE_LINES[1]
    launches = [
        over(codes, area, transpose.amax_of_code_columns, find, WARPS_4, CODE_LINES),
        over(codes, SQUARE, transpose.requantize_lines, arguments, WARPS_8),
    ]
    return launches, (amax,)


def transposition(
    codes: torch.Tensor,
    out: torch.Tensor,
    scale_inv: torch.Tensor | None = None,
    out_scale_inv: torch.Tensor | None = None,
    edge: int = ALL,
) -> Launch:
    """Return how to transpose float8 data, and the scales of their squares of ``edge`` or of the whole matrix.

    ``codes`` are (M, N), contiguous, both even and not 0; ``out`` is (N, M) of the same dtype; scales are contiguous.
    """
    arguments = {
        "codes_ptr": codes.view(torch.uint16),
        "scale_inv_ptr": scale_inv,
        "out_ptr": out.view(torch.uint16),
        "out_scale_inv_ptr": out_scale_inv,
        "EDGE": None if edge == ALL else edge,
    }
    return over(codes, SQUARE, transpose.transpose_codes, arguments, WARPS_8)


def transposed(codes: torch.Tensor) -> Launches:
    """Return how to transpose float8 data into memory of its own."""
    out = codes.new_empty(codes.shape[::-1])
    return Launches([transposition(codes, out)], [out], ())


def cdiv(a: int, b: int) -> int:
    """Return ceiling division. ``triton.cdiv`` has a wrapper that keeps the host longer than an allocation does."""
    return -(-a // b)


def cast_to(format: Float8Format) -> Cast:
    """Return the constants of a format for kernels."""
    return _CASTS[format.dtype, format.scale_rule.is_power_of_2]


def over(
    x: torch.Tensor,
    area: tuple[int, int],
    kernel: Any,
    arguments: dict[str, Any],
    options: dict[str, int],
    tile: tuple[int, int] | None = None,
) -> Launch:
    """Return a launch that covers (M, N), or each of (E, M, N), by one program per area, which it reads in tiles."""
    rows, cols = x.shape[-2:]
    sizes = {**arguments, "M": rows, "N": cols}
    found = covering(kernel, sizes, area if tile is None else tile, options, area)
    return found if x.dim() == 2 else found._replace(programs=len(x) * found.programs)


def covering(
    kernel: Any,
    arguments: dict[str, Any],
    tile: tuple[int, int],
    options: dict[str, int],
    area: tuple[int, int] | None = None,
) -> Launch:
    """Return the launch of ``over`` for the (M, N) of the arguments."""
    rows, cols = arguments["M"], arguments["N"]
    down, along = area or tile
    shape = shape_of(*tile, rows % down == 0 and cols % along == 0)
    # One program per area; WHOLE compiles the kernel without masks.
    return Launch(kernel, cdiv(rows, down) * cdiv(cols, along), {**arguments, "TILE": shape}, options)


def is_paired(x: torch.Tensor, edge: int, rows: int | None = None) -> bool:
    """Return whether kernels of pairs read a matrix in squares, of ``rows`` if its groups are laid out."""
    is_whole = (x.shape[0] if rows is None else rows) % edge == 0 and x.shape[1] % edge == 0
    in_words = x.dtype == torch.bfloat16 and x.data_ptr() % 4 == 0
    return is_whole and in_words and support.compares_pairs(x.device)


def _empty(like: torch.Tensor, format: Float8Format, rows: int, depth: int) -> Operand:
    data = like.new_empty((rows, depth), dtype=format.dtype)
    return Operand(data, empty_scale_inv(like, format, rows, depth), format)


def operands(row: Operand | None, col: Operand | None) -> dict[str, Any]:
    """Return the arguments for what is filled."""
    found: dict[str, Any] = dict.fromkeys(("row_ptr", "row_scale_inv_ptr", "col_ptr", "col_scale_inv_ptr"))
    if row is not None:
        found.update(row_ptr=row.data.view(torch.uint8), row_scale_inv_ptr=_read(row.scale_inv))
    if col is not None:
        # Two rows' codes of a column are a word, where no word holds codes of two columns.
        words = torch.uint16 if col.data.shape[-1] % 2 == 0 else torch.uint8
        found.update(col_ptr=col.data.view(words), col_scale_inv_ptr=_read(col.scale_inv))
    return found


def _read(scale_inv: torch.Tensor) -> torch.Tensor:
    return scale_inv if scale_inv.dtype == torch.float32 else scale_inv.view(torch.uint8)


def _one_scale(
    x: torch.Tensor,
    filled: dict[str, Any],
    prior: PriorScale | None,
    amax: torch.Tensor | None,
    zero: torch.Tensor | None,
) -> tuple[list[Launch], torch.Tensor | None, tuple[torch.Tensor, ...]]:
    """Return the launches, what becomes the largest magnitude where there is a prior scale, and scratch memory."""
    bits = largest = None
    if prior is None and amax is None:
        bits = torch.zeros(1, dtype=torch.int32, device=x.device) if zero is None else zero
    elif prior is not None and (prior.covers or not prior.is_known):
        # One allocation, and one launch to zero it, for both.
        largest, bits = torch.zeros(2, 1, 1, dtype=torch.int32, device=x.device).unbind()
    elif prior is not None:
        # A prior scale that is there and stays as it is needs no amax.
        largest = torch.zeros(1, 1, dtype=torch.int32, device=x.device)
    launches = []
    if bits is not None:
        find = {
            "x_ptr": x,
            "amax_ptr": bits,
            "prior_ptr": None if prior is None or prior.covers else prior.scale,
            "SIZE": x.numel(),
            "STRIDE": None,
            "BLOCK": ELEMENTS,
            "WHOLE": x.numel() % ELEMENTS == 0,
        }
        launches.append(Launch(quantize.amax_of_matrix, cdiv(x.numel(), ELEMENTS), find, WARPS_8))
        amax = bits.view(torch.float32)
    arguments = {
        **filled,
        "amax_ptr": amax,
        "prior_ptr": None if prior is None else prior.scale,
        "largest_ptr": largest,
        "HEADROOM": 1.0 if prior is None else 2.0**prior.margin,
        "COVERS": prior is not None and prior.covers,
    }
    paired = prior is not None and filled["col_ptr"] is not None and is_paired(x, EDGE)
    kernel = quantize_bf16x2.cast_pairs_with_prior if paired else quantize.cast_with_one
    launches.append(over(x, SQUARE, kernel, arguments, WARPS_8))
    scratch = () if bits is None or prior is not None else (bits,)
    return launches, None if largest is None else largest.view(torch.float32), scratch


def _lines(x: torch.Tensor, filled: dict[str, Any]) -> tuple[list[Launch], tuple[torch.Tensor, ...]]:
    rows, cols = x.shape
    if filled["col_ptr"] is None and cols <= ROW_PART:
        # The sides of Triton's tiles are powers of two.
        along = max(1 << (cols - 1).bit_length(), 16)
        return [over(x, (WHOLE_ROWS // along, along), quantize.quantize_whole_rows, filled, WARPS_4)], ()
    if filled["col_ptr"] is None:
        arguments = {**filled, "N": cols, "PART": ROW_PART, "WHOLE": cols % ROW_PART == 0}
        return [Launch(quantize.quantize_rows, rows, arguments, WARPS_8)], ()
    # One allocation; the amaxes of the columns begin at a multiple of 16 bytes.
    counts = [0 if filled["row_ptr"] is None else rows + -rows % 4, cols + -cols % 4]
    scratch = torch.zeros(sum(counts), dtype=torch.int32, device=x.device)
    row_bits, col_bits = scratch.split(counts)
    find = {"x_ptr": x, "row_amax_ptr": None, "col_amax_ptr": col_bits, **LINES_READ}
    filled |= {**dict.fromkeys(("strips_ptr", "COUNT", "STRIPS", "EDGE")), **NOT_COMPUTED}
    make = {**filled, "row_amax_ptr": None, "col_amax_ptr": col_bits.view(torch.float32)}
    if counts[0]:
        find["row_amax_ptr"], make["row_amax_ptr"] = row_bits, row_bits.view(torch.float32)
    area = LINES[0] * LINES_READ["STEPS"], LINES[1]
    launches = [
        over(x, area, quantize.amax_of_lines, find, WARPS_4, LINES),
        over(x, CAST_LINES, quantize.cast_with_lines, make, WARPS_4),
    ]
    return launches, (scratch,)


def _vectors(x: torch.Tensor, filled: dict[str, Any]) -> Launch:
    filled |= {"EDGE": EDGE, "strips_ptr": None, "STRIPS": None, "LINES": x.shape[0], **NOT_COMPUTED}
    if filled["col_ptr"] is None:
        # Reading ahead pays where nothing is transposed in shared memory.
        rows_only = over(x, SQUARE, quantize.quantize_vectors, {**filled, "STAGES": 3}, WARPS_8)
        return rows_only._replace(programs=min(rows_only.programs, AT_A_TIME))
    if is_paired(x, EDGE):
        options = WARPS_8 if filled["row_ptr"] is None else {**WARPS_8, "maxnreg": PAIRED_REGISTERS}
        return over(x, SQUARE, quantize_bf16x2.quantize_paired_vectors, filled, options)
    tile, options = (CROSSING_ROWS, EDGE), {"num_warps": CROSSING_WARPS}
    return over(x, SQUARE, quantize.quantize_crossing_vectors, filled, options, tile)


def _squares(x: torch.Tensor, filled: dict[str, Any], edge: int) -> Launch:
    filled |= {"EDGE": edge, "STRIDE": None, "strips_ptr": None, "STRIPS": None, **NOT_COMPUTED}
    if filled["col_ptr"] is not None and edge in support.PAIRED_SQUARES and is_paired(x, edge):
        tile = edge, PAIRED_SQUARE_COLS
        return over(x, (edge, edge), quantize_bf16x2.quantize_paired_squares, filled, WARPS_8, tile)
    # Two programs on an SM: one loads while the other one casts.
    options = {**WARPS_8, "maxnreg": REGISTERS}
    return over(x, (edge, edge), quantize.quantize_squares, filled, options, SQUARE)


PART = 64, EDGE
"""Tiles of ``cast_part``."""


def part_cast(part: ShardSlice, out: torch.Tensor) -> Launch:
    """Return how to cast a part that ``support.takes_slice`` takes into ``out``, (M, N), adjacent in a row."""
    arguments = {
        "x_ptr": part.x,
        "scale_ptr": part.scale,
        "out_ptr": out,
        "OUT_STRIDE": out.stride(0),
        "SCALE_STRIDE": part.scale.stride(0),
        "first_row": part.offset[0],
        "first_col": part.offset[1],
        **_of_tiles(part.format, part.through),
    }
    return over(part.x, PART, quantize.cast_part, arguments, WARPS_8)


class SliceCasts:
    """Casts many parts into one memory, worked out once, to be run whenever their values changed.

    It holds where the parts lie, and neither the parts nor a memory.

    Args:
        parts: those that ``support.takes_slice`` takes.
        offsets: the bytes from the memory's begin to the data of each, multiples of ``ALIGNMENT``.
    """

    def __init__(self, parts: Sequence[ShardSlice], offsets: Sequence[int]) -> None:
        # A launch is compiled for one of each: format, dtypes, alignment, and whether tiles are whole.
        groups = defaultdict(list)
        for part, offset in zip(parts, offsets, strict=True):
            key = part.format, part.through, part.x.dtype, _is_aligned(part), _is_whole(part)
            groups[key].append((part, offset))
        self._launches = [_of_many(placed, *key[-2:]) for key, placed in groups.items()]
        arguments = [value for each in self._launches for value in each.arguments.values()]
        self._tables = [value for value in arguments if isinstance(value, torch.Tensor)]
        self._addresses = [table.data_ptr() for table in self._tables]
        self._prepared: PreparedLaunches | None = None

    def run(self, memory: torch.Tensor) -> None:
        """Cast each part. ``memory`` begins at a multiple of ``ALIGNMENT``."""
        given = [memory, *self._tables]
        with support.device_of(memory):
            if self._prepared is not None:
                self._prepared.run(given, [memory.data_ptr(), *self._addresses])
                return
            launches = self.launches(memory)
            for each in launches:
                each.run()
            # The interpreter compiles nothing.
            if all(each.compiled is not None for each in launches):
                self._prepared = prepare(Launches(launches, [], []), given)

    def launches(self, memory: torch.Tensor) -> list[Launch]:
        """Return the launches of ``run``."""
        return [each._replace(arguments={**each.arguments, "out_ptr": memory}) for each in self._launches]


def _is_aligned(part: ShardSlice) -> bool:
    """Return whether every row and its codes begin at multiples of 16 elements."""
    sizes = part.x.shape[1], part.out_stride
    return part.x.data_ptr() % ALIGNMENT == 0 and all(size % ALIGNMENT == 0 for size in sizes)


def _is_whole(part: ShardSlice) -> bool:
    """Return whether every program casts a whole tile."""
    rows, cols = part.x.shape
    return rows % PART[0] == 0 and cols % PART[1] == 0


def _of_many(placed: Sequence[tuple[ShardSlice, int]], aligned: bool, whole: bool) -> Launch:
    """Return the launch for parts that one kernel takes, each with the offset of its data, without their memory."""
    rows: list[int] = []
    programs: list[int] = []
    for part, out_offset in placed:
        (height, width), scale = part.x.shape, part.scale
        # Addresses: a shard that moved is found by ``shard._state`` before these are read again.
        rows += [part.x.data_ptr(), sum(programs), height, width, out_offset, part.out_stride]
        rows += [scale.data_ptr(), scale.stride(0), *part.offset]
        programs.append(cdiv(height, PART[0]) * cdiv(width, PART[1]))
    part, device = placed[0][0], placed[0][0].x.device
    counts = torch.tensor(programs, dtype=torch.int64, device="cpu")
    of_program = torch.arange(len(placed), dtype=torch.int32, device="cpu").repeat_interleave(counts)
    arguments = {
        "parts_ptr": sent_to(device, rows),
        "part_of_program_ptr": sent_to(device, of_program),
        "ELEMENT": INPUTS[part.x.dtype],
        "ALIGNED": aligned,
        "TILE": Shape(*PART, whole),
        **_of_tiles(part.format, part.through),
    }
    return Launch(quantize.cast_parts, sum(programs), arguments, WARPS_8)


def _of_tiles(format: Float8Format, through: torch.dtype) -> dict[str, Any]:
    rows, cols = (None if edge == ALL else edge for edge in (format.tile.rows, format.tile.cols))
    return {
        "TILE_ROWS": rows,
        "TILE_COLS": cols,
        "CAST": cast_to(format),
        "THROUGH": INPUTS[through],
    }
