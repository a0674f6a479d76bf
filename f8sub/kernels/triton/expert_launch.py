"""Which kernels run over the weights of all experts, with which arguments, and what they fill."""

from dataclasses import replace
from typing import Any

import torch

from f8sub.formats import Float8Format, Operand
from f8sub.kernels.triton import quantize, quantize_one_pass
from f8sub.kernels.triton.launch import Launch
from f8sub.kernels.triton.prepared import Made
from f8sub.kernels.triton.quantize_grouped_launch import AHEAD_BYTES, LEAST_BYTES
from f8sub.kernels.triton.quantize_launch import (
    ELEMENTS,
    REGISTERS,
    SQUARE,
    WARPS_4,
    WARPS_8,
    cast_to,
    cdiv,
    deriving,
    over,
)
from f8sub.kernels.triton.support import TENSORWISE

IN_TURN = 8192
"""Elements that one program of ``quantize_bands_in_turn`` reads."""

TURN_BYTES = 6 * 2**20
"""The most that an expert's weight has if it is cast in turn; all of them together have at least ``LEAST_BYTES``."""


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
    options = {**WARPS_8, "maxnreg": REGISTERS}
    launches = [over(w, (edge, edge), quantize.quantize_squares, arguments, options, SQUARE)]
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
    launches, scratch = deriving(rowwise, derived)
    return Made(launches, derived[:2], scratch)


def _one_scale(w: torch.Tensor, made: Operand) -> Made:
    count, rows, cols = w.shape
    size = rows * cols
    if LEAST_BYTES <= w.nbytes <= TURN_BYTES * count:
        return _one_scale_in_turn(w, made)
    bits = torch.zeros(count, dtype=torch.int32, device=w.device)
    block = {"SIZE": size, "STRIDE": w.stride(0), "BLOCK": ELEMENTS, "WHOLE": size % ELEMENTS == 0}
    programs = count * cdiv(size, ELEMENTS)
    make = {
        "amax_ptr": bits.view(torch.float32),
        "row_ptr": made.data.view(torch.uint8),
        "row_scale_inv_ptr": made.scale_inv,
        "CAST": cast_to(made.format),
    }
    launches = [
        Launch(quantize.amax_of_bands, programs, {"x_ptr": w, "amax_ptr": bits, **block}, WARPS_8),
        Launch(quantize.cast_bands, programs, {"x_ptr": w, **make, **block}, WARPS_8),
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
    launches = [Launch(quantize_one_pass.quantize_bands_in_turn, programs, arguments, WARPS_4)]
    return Made(launches, made[:2], (bits,))
