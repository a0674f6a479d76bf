"""Layer 1. Which kernels make SwiGLU's codes, forward and backward, with which arguments, and what they fill."""

import functools
from typing import Any, NamedTuple

import torch

from f8sub.formats import Float8Format, Operand
from f8sub.kernels.delayed import PastScale
from f8sub.kernels.fused import EDGE, ROWWISE, TENSORWISE, VECTOR
from f8sub.kernels.triton import dswiglu, dswiglu_blocks, dswiglu_paired, swiglu
from f8sub.kernels.triton.launch import (
    REGISTERS,
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

PER_AMAX, PER_CAST = 4096, 2048
"""Elements that one program of the kernels without tiles looks through for an amax, or casts; of 4 warps both.

On an H200 casts of 8192 elements by 8 warps had 0.66 of a copy's speed, as now 0.97; amaxes forward 0.84 and 0.88.
"""

ROW_PART = 2048
"""What one step of ``quantize_swiglu_rows`` makes of a row."""

SHORT_ROW, PER_WARP, SHORT_ROW_REGISTERS = 16384, 1024, 64
"""The longest rows that ``quantize_short_swiglu_rows`` takes, what one warp makes of them, and a thread's registers.

On an H200 168 us at 8192x14336, where rows of which all is made twice take 258.
"""

FORWARD_ROWS = 32
"""Height of the tiles of the forward's kernels."""

LINES, PAIRED_LINES = {"ROWS": 32, "COLS": 128, "STEPS": 16}, {"ROWS": 16, "COLS": 128, "STEPS": 32}
"""Of ``amax_of_dswiglu_lines`` and of its kernel of pairs: tiles below each other that one program looks through.

On an H200 367 us at 8192x14336, of pairs 299; of pairs in tiles of 32 rows 391.
"""

WITH_ONE, WITH_LINES, IN_SQUARES = (64, 128), (64, 64), (64, 128)
"""Tiles of the backward's kernels."""

PAIRED_AT_A_TIME, PAIRED_STAGES = 132, 3
"""Programs of ``quantize_paired_dswiglu_vectors``, one for each SM of an H200, and tiles that one has at a time.

On an H200 0.67 of a copy's speed at 8192x14336, with two tiles 0.57, with one 0.44, as without pairs.
"""

SHARED_TO_PREFETCH = 208 * 1024
"""Bytes of shared memory that it takes with so many tiles (scripts/kernel_report.py)."""

RESULTS = ("dgate_", "dup_", "h_")
"""What the names of the backward's results begin with."""


class Forward(NamedTuple):
    """How h is made, and what is filled.

    Attributes:
        launches: in order.
        row: h's rowwise operand.
        scale: float32, (1, 1), where h has one scale; else None.
        largest: float32, (1, 1), h's largest magnitude where its scale is of the past; else None.
    """

    launches: list[Launch]
    row: Operand
    scale: torch.Tensor | None
    largest: torch.Tensor | None


class Gradient(NamedTuple):
    """What is filled of one gradient.

    Attributes:
        row: the rowwise operand; None where it is left out.
        col: the columnwise one; likewise.
        largest: float32, (1, 1), the largest magnitude where the scale is of the past; else None.
    """

    row: Operand | None
    col: Operand | None
    largest: torch.Tensor | None

    @classmethod
    def to_fill(
        cls, like: torch.Tensor, usages: tuple[Float8Format | None, Float8Format | None], *, of_the_past: bool
    ) -> "Gradient":
        """To be filled, ``largest`` as the bits of 0."""
        rowwise, columnwise = usages
        return cls(
            None if rowwise is None else empty(like, rowwise, *like.shape),
            None if columnwise is None else empty(like, columnwise, *like.shape[::-1]),
            torch.zeros(1, 1, dtype=torch.float32, device=like.device) if of_the_past else None,
        )


class Backward(NamedTuple):
    """How the gradients are made, and what is filled.

    Attributes:
        launches: in order.
        dgate: of gate.
        dup: of up.
        h_col: h's columnwise operand; None where it is left out.
    """

    launches: list[Launch]
    dgate: Gradient
    dup: Gradient
    h_col: Operand | None


def forward(
    gate: torch.Tensor, up: torch.Tensor, format: Float8Format, past: PastScale | None = None
) -> Forward:
    """How to make ``silu(gate) * up`` and cast its rows.

    Args:
        gate: (M, N), not empty, contiguous; bfloat16 or float16.
        up: likewise.
        format: one that ``fused.why_no_kernel`` has no reason against.
        past: the scale of h's past amaxes, for a format with one scale; None for that of its own amax.
    """
    row = empty(gate, format, *gate.shape)
    both = {"gate_ptr": gate, "up_ptr": up}
    made = {**both, "row_ptr": row.data.view(torch.uint8), "row_scale_inv_ptr": row.scale_inv, **rule(format)}
    if format.tile == TENSORWISE:
        return _forward_with_one(both, made, row, past)
    if format.tile == ROWWISE:
        return Forward([_forward_with_rows(made, *gate.shape)], row, None, None)
    shape = (FORWARD_ROWS, EDGE)
    if format.tile == VECTOR:
        arguments = {**made, **tiles_of(gate, *shape)}
        programs = programs_of(gate, *shape)
        # 8 warps have 0.88 of a copy's speed on an H200, 4 have 0.93.
        launch = Launch(swiglu.quantize_swiglu_vectors, programs, arguments, {"num_warps": 4})
        return Forward([launch], row, None, None)
    edge = format.tile.cols
    arguments = {**made, **tiles_of(gate, edge, edge), "EDGE": edge, "ROWS": shape[0], "COLS": shape[1]}
    return Forward(
        [Launch(swiglu.quantize_swiglu_squares, programs_of(gate, edge, edge), arguments)], row, None, None
    )


def _forward_with_rows(made: dict[str, Any], rows: int, cols: int) -> Launch:
    part = max(PER_WARP, 1 << (cols - 1).bit_length())
    if cols > SHORT_ROW:
        arguments = {**made, "N": cols, "PART": ROW_PART, "WHOLE": cols % ROW_PART == 0}
        return Launch(swiglu.quantize_swiglu_rows, rows, arguments)
    arguments = {**made, "N": cols, "PART": part, "WHOLE": cols == part}
    options = {"num_warps": part // PER_WARP, "maxnreg": SHORT_ROW_REGISTERS}
    return Launch(swiglu.quantize_short_swiglu_rows, rows, arguments, options)


def _forward_with_one(
    both: dict[str, Any], made: dict[str, Any], row: Operand, past: PastScale | None
) -> Forward:
    size = row.data.numel()
    amax = row.data.new_zeros(1, dtype=torch.int32)
    largest = None if past is None else torch.zeros(1, 1, dtype=torch.int32, device=row.data.device)
    scale = torch.empty_like(row.scale_inv)
    known = {"past_ptr": None if past is None else past.scale}
    cast = {
        **made,
        **known,
        **_extent(size, PER_CAST),
        "amax_ptr": amax.view(torch.float32),
        "largest_ptr": largest,
        "scale_ptr": scale,
        "HEADROOM": 1.0 if past is None else 2.0**past.margin,
    }
    launches = [Launch(swiglu.cast_swiglu_with_one, cdiv(size, PER_CAST), cast, {"num_warps": 4})]
    if past is None or not past.is_known:
        find = {**both, **known, **_extent(size, PER_AMAX), "amax_ptr": amax}
        launches.insert(0, Launch(swiglu.amax_of_swiglu, cdiv(size, PER_AMAX), find, {"num_warps": 4}))
    return Forward(launches, row, scale, None if largest is None else largest.view(torch.float32))


def _extent(size: int, block: int) -> dict[str, Any]:
    """Arguments of kernels that work on elements in a row, ``block`` of them a program."""
    return {"SIZE": size, "BLOCK": block, "WHOLE": size % block == 0}


def backward(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    usages: tuple[Float8Format | None, Float8Format | None],
    h_format: Float8Format | None,
    h_scale: torch.Tensor | None,
    pasts: tuple[PastScale, PastScale] | None = None,
) -> Backward:
    """How to make the gradients of gate and up, and h once more, and cast them.

    Args:
        inputs: dh, gate and up, all (M, N), not empty, contiguous, of one dtype, bfloat16 or float16.
        usages: rowwise and columnwise format of both gradients; None to leave a usage out, not both, and equal
            where neither is.
        h_format: of h's columnwise operand, with tiles as ``usages``'; None to leave it out.
        h_scale: what h's rows were cast with, for a format with one scale.
        pasts: the scales of the past amaxes of dgate and dup, for a format with one scale; None for those of
            their own amaxes.
    """
    gate = inputs[1]
    rowwise, columnwise = usages
    format = rowwise or columnwise
    if format is None:
        raise RuntimeError("asked to quantize for no usage")
    dgate, dup = (Gradient.to_fill(gate, usages, of_the_past=pasts is not None) for _ in range(2))
    h_col = None if h_format is None else empty(gate, h_format, *gate.shape[::-1])
    arguments: dict[str, Any] = {
        **dict(zip(("dh_ptr", "gate_ptr", "up_ptr"), inputs, strict=True)),
        **_named("dgate", dgate.row, dgate.col),
        **_named("dup", dup.row, dup.col),
        **{name: value for name, value in _named("h", None, h_col).items() if "_col_" in name},
        **rule(format),
        **{f"H_{name}": value for name, value in rule(h_format or format).items()},
    }
    if format.tile == TENSORWISE:
        launches = _backward_with_one(arguments, (dgate, dup), h_scale, pasts)
    elif format.tile == ROWWISE:
        launches = _backward_with_lines(arguments, gate)
    else:
        launches = _backward_with_blocks(arguments, gate, format.tile.cols, format.tile == VECTOR)
    return Backward(launches, dgate, dup, h_col)


def _named(name: str, row: Operand | None, col: Operand | None) -> dict[str, Any]:
    return {f"{name}_{argument}": value for argument, value in operands(row, col).items()}


def _backward_with_one(
    arguments: dict[str, Any],
    gradients: tuple[Gradient, Gradient],
    h_scale: torch.Tensor | None,
    pasts: tuple[PastScale, PastScale] | None,
) -> list[Launch]:
    del arguments["H_POWER_OF_2"]
    gate: torch.Tensor = arguments["gate_ptr"]
    size = gate.numel()
    amax = torch.zeros(2, dtype=torch.int32, device=gate.device)
    dgate_largest, dup_largest = (
        None if made.largest is None else made.largest.view(torch.int32) for made in gradients
    )
    known = {
        "dgate_past_ptr": None if pasts is None else pasts[0].scale,
        "dup_past_ptr": None if pasts is None else pasts[1].scale,
    }
    find = {
        **{name: arguments[name] for name in ("dh_ptr", "gate_ptr", "up_ptr")},
        **known,
        **_extent(size, PER_AMAX),
        "amax_ptr": amax,
    }
    # With scales of the past, or with masks, that cap would have registers spill.
    options, extent = {"num_warps": 8}, tiles_of(gate, *WITH_ONE)
    if pasts is None and extent["WHOLE"]:
        options["maxnreg"] = REGISTERS
    cast = {
        **arguments,
        **known,
        "amax_ptr": amax.view(torch.float32),
        "dgate_largest_ptr": dgate_largest,
        "dup_largest_ptr": dup_largest,
        "scale_ptr": h_scale,
        "DGATE_HEADROOM": 1.0 if pasts is None else 2.0 ** pasts[0].margin,
        "DUP_HEADROOM": 1.0 if pasts is None else 2.0 ** pasts[1].margin,
        **extent,
    }
    launches = [Launch(dswiglu.cast_dswiglu_with_one, programs_of(gate, *WITH_ONE), cast, options)]
    if pasts is None or not all(past.is_known for past in pasts):
        kernel = dswiglu.amax_of_dswiglu
        if _are_paired(arguments):
            kernel, find = dswiglu_paired.amax_of_paired_dswiglu, of_pairs(find)
        launches.insert(0, Launch(kernel, cdiv(size, PER_AMAX), find, {"num_warps": 4}))
    return launches


@functools.cache
def prefetches_tiles(device: torch.device) -> bool:
    """Whether a program has room for PAIRED_STAGES tiles; said of what is no GPU, where launches are only looked at."""
    if device.type != "cuda":
        return True
    properties: Any = torch.cuda.get_device_properties(device)
    room: int = properties.shared_memory_per_block_optin
    return room >= SHARED_TO_PREFETCH


def _are_paired(arguments: dict[str, Any]) -> bool:
    """Whether kernels of pairs take what the backward reads."""
    return all(is_paired(arguments[name], EDGE) for name in ("dh_ptr", "gate_ptr", "up_ptr"))


def _backward_with_lines(arguments: dict[str, Any], gate: torch.Tensor) -> list[Launch]:
    rows, cols = gate.shape
    counts = {
        f"{name}_{lines}_amax_ptr": count if arguments.get(f"{name}_{lines}_ptr") is not None else 0
        for name in ("dgate", "dup", "h")
        for lines, count in (("row", rows), ("col", cols))
        if (name, lines) != ("h", "row")
    }
    found = zeroed(counts, gate.device)
    are_paired = _are_paired(arguments)
    lines = PAIRED_LINES if are_paired else LINES
    height, width = lines["ROWS"] * lines["STEPS"], lines["COLS"]
    find = {
        **{name: arguments[name] for name in ("dh_ptr", "gate_ptr", "up_ptr")},
        **found,
        **tiles_of(gate, height, width),
        **lines,
    }
    kernel = dswiglu.amax_of_dswiglu_lines
    if are_paired:
        kernel, find = dswiglu_paired.amax_of_paired_dswiglu_lines, of_pairs(find)
    return [
        Launch(kernel, programs_of(gate, height, width), find, {"num_warps": 4}),
        Launch(
            dswiglu.cast_dswiglu_with_lines,
            programs_of(gate, *WITH_LINES),
            {**arguments, **as_amaxes(found), **tiles_of(gate, *WITH_LINES)},
            {"num_warps": 4},
        ),
    ]


def _backward_with_blocks(
    arguments: dict[str, Any], gate: torch.Tensor, edge: int, vectors: bool
) -> list[Launch]:
    arguments = {**arguments, **tiles_of(gate, edge, edge), "EDGE": edge}
    count = programs_of(gate, edge, edge)
    if not vectors:
        arguments.update(ROWS=IN_SQUARES[0], COLS=IN_SQUARES[1])
        # Left to itself ptxas spills a register or two.
        options = {"num_warps": 8, "maxnreg": REGISTERS}
        return [Launch(dswiglu_blocks.quantize_dswiglu_squares, count, arguments, options)]
    del arguments["ROWS"], arguments["COLS"]
    if _are_paired(arguments):
        stages, programs = 1, count
        if prefetches_tiles(gate.device):
            stages, programs = PAIRED_STAGES, min(count, PAIRED_AT_A_TIME)
        arguments = {**of_pairs(arguments), "STAGES": stages}
        return [Launch(dswiglu_paired.quantize_paired_dswiglu_vectors, programs, arguments)]
    if arguments["WHOLE"]:
        return [Launch(dswiglu_blocks.quantize_dswiglu_vectors, count, arguments)]
    # What masks take of the registers is too much for two results at once.
    launches = []
    for kept in RESULTS:
        others = tuple(result for result in RESULTS if result != kept)
        one = {name: None if name.startswith(others) else value for name, value in arguments.items()}
        if any(value is not None for name, value in one.items() if name.startswith(kept)):
            launches.append(Launch(dswiglu_blocks.quantize_dswiglu_vectors, count, one))
    return launches
