"""Which kernels run over the weights of all experts, with which arguments, and what they fill."""

from dataclasses import replace
from typing import Any

import torch

from f8sub.formats import Float8Format, Operand
from f8sub.kernels.triton import casts, in_turn, recasts
from f8sub.kernels.triton.grouped_launch import AHEAD_BYTES, is_in_turn, over
from f8sub.kernels.triton.launch import (
    CODE_LINES,
    CODE_LINES_READ,
    CODES,
    ELEMENTS,
    REGISTERS,
    SQUARE,
    cast_to,
    cdiv,
)
from f8sub.kernels.triton.launcher import Launch
from f8sub.kernels.triton.prepared import Made
from f8sub.kernels.triton.support import TENSORWISE

IN_TURN = 8192
"""Elements that one program of ``quantize_bands_in_turn`` reads."""

_WARPS_4, _WARPS_8 = {"num_warps": 4}, {"num_warps": 8}


def quantization(w: torch.Tensor, made: Operand) -> Made:
    """How to make the codes and scales of all experts, whose tiles begin anew in every one.

    Args:
        w: (E, N, K), not empty; each expert's matrix is contiguous.
        made: what is filled, (E, N, K) and (E, n, k), contiguous: one scale an expert, or squares of whole 128s.
    """
    format = made.format
    if format.tile.is_whole:
        return _one_scale(w, made)
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
    options = {**_WARPS_8, "maxnreg": REGISTERS}
    launches = [_over_all(casts.quantize_squares, w.shape, arguments, SQUARE, options, (edge, edge))]
    return Made(launches, made[:2], ())


def quantization_in_bands(x: torch.Tensor, format: Float8Format) -> Made:
    """How to make rowwise codes, (M, K), of a matrix of which one scale serves so many whole rows, and no others."""
    bands = x.unflatten(0, (-1, format.tile.rows))
    data = bands.new_empty(bands.shape, dtype=format.dtype)
    scale_inv = bands.new_empty((len(bands), 1, 1), dtype=torch.float32)
    found = quantization(bands, Operand(data, scale_inv, replace(format, tile=TENSORWISE)))
    return found._replace(results=[data.view(x.shape), scale_inv.view(-1, 1)])


def derivation(rowwise: Operand, derived: Operand) -> Made:
    """How to make the columnwise codes and scales of all experts from their rowwise ones.

    Args:
        rowwise: (E, N, K), contiguous, N and K even; one scale an expert, squares, or one scale a row.
        derived: what is filled, (E, K, N), contiguous; its tiles are those of ``rowwise`` transposed, or both have one
            scale a row.
    """
    codes, scale_inv, own = rowwise[:3]
    format = derived.format
    if own.tile.is_transpose_of(format.tile):
        arguments: dict[str, Any] = {
            "codes_ptr": codes.view(torch.uint16),
            "scale_inv_ptr": scale_inv,
            "out_ptr": derived.data.view(torch.uint16),
            "out_scale_inv_ptr": derived.scale_inv,
            "EDGE": None if own.tile.is_whole else own.tile.rows,
        }
        launches = [_over_all(recasts.transpose_codes, codes.shape, arguments, SQUARE, _WARPS_8)]
        return Made(launches, derived[:2], ())
    amax = torch.zeros(codes.shape[0] * codes.shape[2], dtype=torch.int32, device=codes.device)
    arguments = {
        "codes_ptr": codes.view(torch.uint8),
        "scale_inv_ptr": scale_inv,
        "SCALE_STRIDE": 1,
        "SOURCE": CODES[own.dtype],
        "col_ptr": derived.data.view(torch.uint16),
        "col_scale_inv_ptr": derived.scale_inv,
        "CAST": cast_to(format),
    }
    find = {**arguments, **CODE_LINES_READ, "col_amax_ptr": amax}
    arguments["col_amax_ptr"] = amax.view(torch.float32)
    tile = CODE_LINES
    area = tile[0] * CODE_LINES_READ["STEPS"], tile[1]
    launches = [
        _over_all(recasts.amax_of_code_columns, codes.shape, find, tile, _WARPS_4, area),
        _over_all(recasts.recast_by_lines, codes.shape, arguments, SQUARE, _WARPS_8),
    ]
    return Made(launches, derived[:2], (amax,))


def _one_scale(w: torch.Tensor, made: Operand) -> Made:
    count, rows, cols = w.shape
    size = rows * cols
    bits = torch.zeros(count, dtype=torch.int32, device=w.device)
    if is_in_turn(w, count):
        return _one_scale_in_turn(w, made)
    block = {"SIZE": size, "STRIDE": w.stride(0), "BLOCK": ELEMENTS, "WHOLE": size % ELEMENTS == 0}
    programs = count * cdiv(size, ELEMENTS)
    make = {
        "amax_ptr": bits.view(torch.float32),
        "row_ptr": made.data.view(torch.uint8),
        "row_scale_inv_ptr": made.scale_inv,
        "CAST": cast_to(made.format),
    }
    launches = [
        Launch(casts.amax_of_bands, programs, {"x_ptr": w, "amax_ptr": bits, **block}, _WARPS_8),
        Launch(casts.cast_bands, programs, {"x_ptr": w, **make, **block}, _WARPS_8),
    ]
    return Made(launches, made[:2], (bits,))


def _one_scale_in_turn(w: torch.Tensor, made: Operand) -> Made:
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
        "BANDS": count,
        "AHEAD": min(cdiv(AHEAD_BYTES, size * w.itemsize), count - 1),
        "SIZE": size,
        "STRIDE": w.stride(0),
        "CAST": cast_to(made.format),
        "BLOCK": IN_TURN,
        "WHOLE": size % IN_TURN == 0,
    }
    programs = 2 * count * cdiv(size, IN_TURN)
    launches = [Launch(in_turn.quantize_bands_in_turn, programs, arguments, _WARPS_4)]
    return Made(launches, made[:2], (bits,))


def _over_all(
    kernel: Any,
    shape: tuple[int, ...],
    arguments: dict[str, Any],
    tile: tuple[int, int],
    options: dict[str, int],
    area: tuple[int, int] | None = None,
) -> Launch:
    """A kernel that covers each of (E, N, K) experts by one program an area."""
    count, rows, cols = shape
    found = over(kernel, {**arguments, "M": rows, "N": cols}, tile, options, area)
    return found._replace(programs=count * found.programs)
