"""Quantizers of the weights of experts on CUDA, all experts in one launch; the specification for everything else.

All of them are bitwise equal to ``experts``, so none is asked for by name.
"""

from types import ModuleType

import torch

from f8sub.formats import HIGH_PRECISION, Float8Format
from f8sub.kernels import experts as specification
from f8sub.kernels.experts import ExpertWeights
from f8sub.kernels.groups import Groups
from f8sub.kernels.triton import quantize_cuda, quantize_groups_cuda, support
from f8sub.kernels.triton.quantize_groups_cuda import is_of_exponents
from f8sub.kernels.triton.support import EDGE, ROWWISE


def quantize(w: torch.Tensor, format: Float8Format) -> ExpertWeights:
    """``experts.quantize``; goes there for what no kernel takes. Experts may have any stride."""
    if w.dtype not in HIGH_PRECISION or not support.takes(w) or quantize_groups_cuda.why_no_kernel(format):
        return specification.quantize(w, format)
    count, rows, cols = w.shape
    tile = format.tile
    if tile.is_whole or (tile.rows == tile.cols and tile.rows % EDGE == 0):
        if not w[0].is_contiguous():
            w = w.contiguous()
        with support.device_of(w):
            made = _prepared().run((format, w.stride()), (w,), lambda: _launch().quantization(w, format))
        return ExpertWeights(made[0], made[1], format)
    # No tile knows of an expert.
    flat = w.reshape(count * rows, cols)
    if is_of_exponents(format):
        one = Groups.of(torch.full((1,), len(flat), dtype=torch.int32, device=w.device), len(flat))
        codes, _ = quantize_groups_cuda.quantize(flat, one, format, None)
        found = None if codes is None else (codes.data, codes.scale_inv)
    else:
        operand = quantize_cuda.quantize(flat, format, None).rowwise
        found = None if operand is None else (operand.data, operand.scale_inv)
    if found is None:
        raise RuntimeError("quantize returned no rowwise codes for a rowwise format")
    data, scale_inv = found
    return ExpertWeights(data.view(w.shape), scale_inv.unflatten(0, (count, rows)), format)


def derive_columnwise(rowwise: ExpertWeights, format: Float8Format) -> ExpertWeights:
    """``experts.derive_columnwise``; goes there for what no kernel takes. Kernels make contiguous codes."""
    codes, scale_inv, own = rowwise
    if not (support.takes(codes) and derives(rowwise, format)):
        return specification.derive_columnwise(rowwise, format)
    given = rowwise._replace(scale_inv=scale_inv.contiguous())
    with support.device_of(codes):
        made = _prepared().run(
            (own, format), (codes, given.scale_inv), lambda: _launch().derivation(given, format)
        )
    return ExpertWeights(made[0], made[1], format)


def derives(rowwise: ExpertWeights, format: Float8Format) -> bool:
    """Whether a kernel makes columnwise codes of a format of rowwise ones."""
    codes, _, own = rowwise
    transposes = own.tile.is_transpose_of(format.tile) and (own.tile.is_whole or own.tile.rows % EDGE == 0)
    recasts = own.tile == format.tile == ROWWISE
    in_words = codes.shape[1] % 2 == codes.shape[2] % 2 == 0 and codes.data_ptr() % 2 == 0
    is_plain = own.is_plain and format.is_plain
    return is_plain and codes.is_contiguous() and in_words and (transposes or recasts)


def _launch() -> ModuleType:
    from f8sub.kernels.triton import expert_launch

    return expert_launch


def _prepared() -> ModuleType:
    from f8sub.kernels.triton import prepared

    return prepared
