"""Quantizers of the weights of experts on CUDA, all experts in one launch; the specification for everything else.

All of them are bitwise equal to ``weights``, so none is asked for by name.
"""

from typing import TYPE_CHECKING

import torch

from f8sub.formats import HIGH_PRECISION, Float8Format, Operand
from f8sub.kernels import cuda
from f8sub.kernels.grouped import tokens_cuda, weights
from f8sub.kernels.grouped.groups import Groups
from f8sub.kernels.grouped.weights import ExpertWeights, empty_codes
from f8sub.kernels.triton import support
from f8sub.kernels.triton.support import EDGE, ROWWISE

if TYPE_CHECKING:
    from f8sub.kernels.triton.prepared import Made


def quantize(w: torch.Tensor, format: Float8Format) -> ExpertWeights:
    """``weights.quantize``; goes there for what no kernel takes. Experts may have any stride."""
    if w.dtype not in HIGH_PRECISION or not support.takes(w) or tokens_cuda.why_no_kernel(format):
        return weights.quantize(w, format)
    count, rows, cols = w.shape
    tile = format.tile
    if tile.is_whole or (tile.rows == tile.cols and tile.rows % EDGE == 0):
        if not w[0].is_contiguous():
            w = w.contiguous()
        from f8sub.kernels.triton import prepared

        with support.device_of(w):
            made = prepared.run(format, (w,), lambda: launches(w, format))
        return ExpertWeights(made[0], made[1], format)
    # No tile knows of an expert.
    flat = w.reshape(count * rows, cols)
    if tokens_cuda.is_of_exponents(format):
        one = Groups.of(torch.full((1,), len(flat), dtype=torch.int32, device=w.device), len(flat))
        codes, _ = tokens_cuda.quantize(flat, one, format, None)
        found = None if codes is None else (codes.data, codes.scale_inv)
    else:
        operand = cuda.quantize(flat, format, None).rowwise
        found = None if operand is None else (operand.data, operand.scale_inv)
    if found is None:
        raise RuntimeError("quantize returned no rowwise codes for a rowwise format")
    data, scale_inv = found
    return ExpertWeights(data.view(w.shape), scale_inv.unflatten(0, (count, rows)), format)


def derive_columnwise(rowwise: ExpertWeights, format: Float8Format) -> ExpertWeights:
    """``weights.derive_columnwise``; goes there for what no kernel takes. Kernels make contiguous codes."""
    codes, scale_inv, own = rowwise
    if not (support.takes(codes) and derives(rowwise, format)):
        return weights.derive_columnwise(rowwise, format)
    from f8sub.kernels.triton import prepared

    given = rowwise._replace(scale_inv=scale_inv.contiguous())
    with support.device_of(codes):
        made = prepared.run(
            (own, format), (codes, given.scale_inv), lambda: derivation_launches(given, format)
        )
    return ExpertWeights(made[0], made[1], format)


def launches(w: torch.Tensor, format: Float8Format) -> "Made":
    """How kernels make rowwise codes; they fill what is made here."""
    from f8sub.kernels.triton import expert_launch

    return expert_launch.quantization(w, Operand(*empty_codes(w, format)))


def derivation_launches(rowwise: ExpertWeights, format: Float8Format) -> "Made":
    """How kernels make columnwise codes; they fill what is made here."""
    from f8sub.kernels.triton import expert_launch

    derived = Operand(*empty_codes(rowwise.data.transpose(1, 2), format))
    return expert_launch.derivation(Operand(*rowwise), derived)


def derives(rowwise: ExpertWeights, format: Float8Format) -> bool:
    """Whether a kernel makes columnwise codes of a format of rowwise ones."""
    codes, _, own = rowwise
    transposes = own.tile.is_transpose_of(format.tile) and (own.tile.is_whole or own.tile.rows % EDGE == 0)
    recasts = own.tile == format.tile == ROWWISE
    in_words = codes.shape[1] % 2 == codes.shape[2] % 2 == 0 and codes.data_ptr() % 2 == 0
    is_plain = own.is_plain and format.is_plain
    return is_plain and codes.is_contiguous() and in_words and (transposes or recasts)
