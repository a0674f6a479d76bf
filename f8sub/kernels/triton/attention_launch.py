"""The launches of ``attention.py``'s kernels, and results by launches that are prepared once for each kind of call."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from f8sub.kernels.triton import attention
from f8sub.kernels.triton.launch import Launch, Launches, run
from f8sub.kernels.triton.quantize_launch import CODES

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
    """Return the launch that fills ``out``, the last of the tensors, float32, (7,)."""
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
    """Return the launch that fills ``out`` from codes of as many elements, both without gaps in memory."""
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


def scales_of_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, headroom: float, of_1: float
) -> torch.Tensor:
    """Return float32, (7,), from the inverse scales of q, k and v."""
    return _made(
        ("scales of forward", headroom, of_1),
        (q, k, v),
        lambda: v.new_empty(7),
        lambda out: forward_scales(q, k, v, out, headroom, of_1),
    )


def scales_of_backward(given: Sequence[torch.Tensor], numbers: tuple[float, ...]) -> torch.Tensor:
    """Return float32, (7,), from the inverse scales of forward and of dO, and a history."""
    return _made(
        ("scales of backward", numbers),
        given,
        lambda: given[0].new_empty(7),
        lambda out: backward_scales((*given, out), numbers),
    )


def dequantized(codes: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what codes without gaps in memory stand for."""
    return _made(
        ("dequantized", dtype),
        (codes, scale_inv),
        lambda: torch.empty_like(codes, dtype=dtype),
        lambda out: dequantize(codes, scale_inv, out),
    )


def _made(
    kind: Any,
    given: Sequence[torch.Tensor],
    empty: Callable[[], torch.Tensor],
    launch: Callable[[torch.Tensor], Launch],
) -> torch.Tensor:
    def make() -> Launches:
        out = empty()
        return Launches([launch(out)], [out], [])

    return run(kind, given, make)[0]
