"""The launches of ``attention.py``'s kernels, and results by launches that are prepared once for each kind of call."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from f8sub.kernels.triton import attention, launch
from f8sub.kernels.triton.launch import Launch, Launches
from f8sub.kernels.triton.quantize_launch import CODES, quantization

if TYPE_CHECKING:
    from f8sub.formats import Float8Format

BLOCK = 8192
"""Elements of a program that dequantizes: 64 for each thread of 4 warps."""
ONE_WARP = {"num_warps": 1}
MOST_ROWS = 32
"""Of a history that a program holds, a power of 2."""


def forward_scales(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, headroom: float, of_1: float
) -> Launch:
    """Return the launch that fills ``out``, float32, (7,), from inverse scales of one element each."""
    arguments = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": out, "HEADROOM": headroom, "OF_1": of_1}
    return Launch(attention.forward_scales, 1, arguments, ONE_WARP)


def backward_scales(tensors: tuple[torch.Tensor, ...], numbers: tuple[float, ...]) -> Launch:
    """Return the launch that fills ``out``, the last of the tensors, float32, (10,)."""
    names = "inverse_ptr", "inverse_do_ptr", "history_ptr", "out_ptr"
    arguments: dict[str, Any] = dict(zip(names, tensors, strict=True))
    arguments |= dict(zip(("OF_DP", "TERMS", "TOP", "MARGIN", "OF_1", "LARGEST"), numbers, strict=True))
    arguments |= {"BACKWARDS": len(arguments["history_ptr"]), "ROWS": MOST_ROWS}
    return Launch(attention.backward_scales, 1, arguments, ONE_WARP)


def roll(
    history: torch.Tensor,
    saturated: torch.Tensor,
    amaxes: torch.Tensor,
    scales: torch.Tensor,
    top: float,
    of_1: float,
) -> Launch:
    """Return the launch that writes to ``history`` and ``saturated``."""
    arguments: dict[str, Any] = {
        "history_ptr": history,
        "saturated_ptr": saturated,
        "amaxes_ptr": amaxes,
        "scales_ptr": scales,
    }
    arguments |= {"BACKWARDS": len(history), "TOP": top, "OF_1": of_1, "ROWS": MOST_ROWS}
    return Launch(attention.roll, 1, arguments, ONE_WARP)


def dequantize(codes: torch.Tensor, scale_inv: torch.Tensor, out: torch.Tensor) -> Launch:
    """Return the launch that fills ``out`` from codes that lie as it does, both without gaps in memory."""
    n = codes.numel()
    # Bytes, which Triton's interpreter reads, too.
    arguments = {
        "codes_ptr": codes.view(torch.uint8),
        "scale_inv_ptr": scale_inv,
        "out_ptr": out,
        "N": n,
        "SOURCE": CODES[codes.dtype],
        "BLOCK": BLOCK,
    }
    return Launch(attention.dequantize, -(-n // BLOCK), arguments, {"num_warps": 4})


def cast_forward(
    given: tuple[torch.Tensor, ...], format: "Float8Format", headroom: float, of_1: float
) -> Sequence[torch.Tensor]:
    """Return float8 data of q, k and v, which have no gaps in memory, as they lie; and float32, (7,), of a forward."""

    def make() -> Launches:
        # One memory for the amaxes, which is zeroed once; each begins at a multiple of 16 bytes.
        zeros = torch.zeros(4 * len(given), dtype=torch.int32, device=given[0].device)
        parts = zip(given, zeros.split(4), strict=True)
        casts = [_cast(x, format, zero[:1]) for x, zero in parts]
        inverse = [cast.scale_inv for cast in casts]
        out = inverse[0].new_empty(7)
        last = forward_scales(inverse[0], inverse[1], inverse[2], out, headroom, of_1)
        launches = [*(one for cast in casts for one in cast.launches), last]
        return Launches(launches, [*(cast.data for cast in casts), out, *inverse], [zeros])

    # The last launch alone reads the single inverse scales.
    return launch.run(("attention, forward", format.name, headroom, of_1), given, make)[:4]


def cast_backward(
    given: tuple[torch.Tensor, ...], format: "Float8Format", numbers: tuple[float, ...]
) -> Sequence[torch.Tensor]:
    """Return float8 data of dO and its inverse scale, (1, 1); and float32, (10,), of a backward.

    Args:
        given: dO, which has no gaps in memory, the inverse scales of forward, and a history.
        format: of dO.
        numbers: of ``backward_scales``.
    """

    def make() -> Launches:
        do, inverse, history = given
        zero = torch.zeros(1, dtype=torch.int32, device=do.device)
        cast = _cast(do, format, zero)
        out = inverse.new_empty(10)
        last = backward_scales((inverse, cast.scale_inv, history, out), numbers)
        return Launches([*cast.launches, last], [cast.data, cast.scale_inv, out], [zero])

    return launch.run(("attention, backward", format.name, numbers), given, make)


def finish_backward(
    grads: Sequence[torch.Tensor],
    told: tuple[torch.Tensor, ...],
    top: float,
    of_1: float,
    dtype: torch.dtype,
) -> Sequence[torch.Tensor]:
    """Return what codes of dq, dk and dv stand for, as they lie, and ``roll``.

    Args:
        grads: without gaps in memory.
        told: scales and inverse scales of dP, dq, dk and dv, their amaxes, the history, and what saturated.
        top: of ``roll``; ``of_1`` as well.
        of_1: see ``top``.
        dtype: of the results.
    """

    def make() -> Launches:
        scales, inverse, amaxes, history, saturated = told
        launches, results = _dequantizing(grads, inverse[1:], dtype)
        launches = [roll(history, saturated, amaxes, scales, top, of_1), *launches]
        return Launches(launches, results, [])

    return launch.run(("attention, gradients", top, of_1, dtype), (*grads, *told), make)


def dequantized(
    given: Sequence[torch.Tensor], scale_inv: torch.Tensor, dtype: torch.dtype
) -> Sequence[torch.Tensor]:
    """Return what codes without gaps in memory stand for, as they lie; ``scale_inv``, (n,), has a number of each."""

    def make() -> Launches:
        return Launches(*_dequantizing(given, scale_inv, dtype), [])

    return launch.run(("dequantized", dtype), (*given, scale_inv), make)


def _dequantizing(
    given: Sequence[torch.Tensor], scale_inv: torch.Tensor, dtype: torch.dtype
) -> tuple[list[Launch], list[torch.Tensor]]:
    outs = [torch.empty_like(codes, dtype=dtype) for codes in given]
    scales = [scale_inv[i : i + 1] for i in range(len(outs))]
    launches = [dequantize(*each) for each in zip(given, scales, outs, strict=True)]
    return launches, outs


class _Cast(NamedTuple):
    """One cast of a tensor: what fills the data, which lie as it does, and the inverse scale, (1, 1)."""

    launches: Sequence[Launch]
    data: torch.Tensor
    scale_inv: torch.Tensor


def _cast(x: torch.Tensor, format: "Float8Format", zero: torch.Tensor) -> _Cast:
    # Memory without gaps is a matrix, whatever the order of the dimensions.
    matrix = x.as_strided((x.numel() // x.shape[-1], x.shape[-1]), (x.shape[-1], 1), x.storage_offset())
    launches, (data, scale_inv), _ = quantization(matrix, format, None, zero=zero).made
    return _Cast(launches, data.as_strided(x.shape, x.stride()), scale_inv)
