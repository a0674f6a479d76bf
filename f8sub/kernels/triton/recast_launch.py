"""The launches that make the columnwise usage of rowwise codes, under their scales or others."""

import torch

from f8sub.formats import ALL, Float8Format, Operand
from f8sub.kernels.triton import casts, launch, recasts
from f8sub.kernels.triton.launch import Plan
from f8sub.kernels.triton.launcher import Launch
from f8sub.kernels.triton.quantize_cuda import EDGE, VECTOR

CODE_LINES = {"ROWS": 16, "COLS": 256, "STEPS": 32, "STAGES": 4}
"""Of ``amax_of_code_columns``: codes are half as large as bf16, so that as many bytes are on their way."""


def recast(rowwise: Operand, columnwise: Float8Format) -> Plan:
    """How to make the columnwise usage of codes with one scale a row, or one a vector: ``reference.derive_columnwise``.

    Args:
        rowwise: (M, N), not empty; codes contiguous.
        columnwise: format of the (N, M) result, with the same tile.
    """
    codes, scale_inv, format, _ = rowwise
    col = launch.empty(codes, columnwise, *codes.shape[::-1])
    source = {
        "codes_ptr": codes.view(torch.uint8),
        "scale_inv_ptr": scale_inv,
        "SCALE_STRIDE": scale_inv.stride(0),
        "SOURCE": launch.CODES[format.dtype],
    }
    filled = {name: value for name, value in launch.operands(None, col).items() if name.startswith("col_")}
    make = {**source, **filled, **launch.rule(columnwise), **launch.tiles_of(codes, EDGE, EDGE)}
    programs = launch.programs_of(codes, EDGE, EDGE)
    if format.tile == VECTOR:
        make["BLOCK_STRIDE"] = scale_inv.stride(1)
        return Plan([Launch(recasts.recast_by_vectors, programs, make)], None, col)
    amax = torch.zeros(codes.shape[1], dtype=torch.int32, device=codes.device)
    height = CODE_LINES["ROWS"] * CODE_LINES["STEPS"]
    find = {
        **source,
        "col_amax_ptr": amax,
        **launch.tiles_of(codes, height, CODE_LINES["COLS"]),
        **CODE_LINES,
    }
    options = {"num_warps": 4}
    launches = [
        Launch(
            recasts.amax_of_code_columns, launch.programs_of(codes, height, CODE_LINES["COLS"]), find, options
        ),
        Launch(recasts.recast_by_lines, programs, {**make, "col_amax_ptr": amax.view(torch.float32)}),
    ]
    return Plan(launches, None, col)


def transposition(codes: torch.Tensor) -> tuple[Launch, torch.Tensor]:
    """How to transpose float8 codes.

    Args:
        codes: (M, N), contiguous, both even and not 0.

    Returns:
        The launch and what it fills: (N, M) of the same dtype.
    """
    out = codes.new_empty(codes.shape[::-1])
    return _transposition(codes, None, out, None, ALL), out


def derivation(rowwise: Operand, columnwise: Float8Format) -> tuple[Launch, Operand]:
    """How to transpose codes and the scales of their squares, or of the whole matrix: ``reference.transposed``.

    Args:
        rowwise: codes as ``transposition`` has them.
        columnwise: one whose tiles are the transposed ones of ``rowwise``; see ``fused.why_no_kernel``.

    Returns:
        The launch and what it fills.
    """
    col = launch.empty(rowwise.data, columnwise, *rowwise.data.shape[::-1])
    scale_inv = rowwise.scale_inv.contiguous()
    return _transposition(rowwise.data, scale_inv, col.data, col.scale_inv, columnwise.tile.cols), col


def _transposition(
    codes: torch.Tensor,
    scale_inv: torch.Tensor | None,
    out: torch.Tensor,
    out_scale_inv: torch.Tensor | None,
    edge: int,
) -> Launch:
    arguments = {
        "codes_ptr": codes.view(torch.uint16),
        "scale_inv_ptr": scale_inv,
        "out_ptr": out.view(torch.uint16),
        "out_scale_inv_ptr": out_scale_inv,
        "TILE": None if edge == ALL else edge,
        **launch.tiles_of(codes, EDGE, EDGE),
    }
    return Launch(casts.transpose_codes, launch.programs_of(codes, EDGE, EDGE), arguments)
