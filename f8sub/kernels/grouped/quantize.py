"""Experts' operands, by the fastest kernel that takes them; all of them agree to the bit. One node in compiled code."""

import torch

from f8sub.formats import Float8Format
from f8sub.kernels.grouped import quantize_ops, tokens_cuda, weights_cuda
from f8sub.kernels.grouped.groups import Groups
from f8sub.kernels.grouped.tokens import Tokens
from f8sub.kernels.grouped.weights import ExpertWeights, seen_transposed


def quantize_tokens(
    x: torch.Tensor, groups: Groups, format: Float8Format, *, contracted: bool, multiple: int = 1
) -> Tokens:
    """``tokens.quantize``."""
    if contracted:
        found = quantize_both(x, groups, None, format, multiple)[1]
    else:
        found = quantize_both(x, groups, format, None)[0]
    if found is None:
        raise RuntimeError("quantize_both returned no operand for a format")
    return found


def quantize_both(
    x: torch.Tensor,
    groups: Groups,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    multiple: int = 1,
) -> tuple[Tokens | None, Tokens | None]:
    """Both operands of tokens, see ``quantize_tokens``, None where not asked for; ``columnwise`` is ``contracted``."""
    if rowwise is None and columnwise is None:
        return None, None
    if torch.compiler.is_compiling():
        return quantize_ops.quantized_groups(x, groups, rowwise, columnwise, multiple)
    return tokens_cuda.quantize(x, groups, rowwise, columnwise, multiple)


def quantize_experts(w: torch.Tensor, format: Float8Format) -> ExpertWeights:
    """Rowwise codes of all experts: ``weights.quantize``. One node in compiled code."""
    if torch.compiler.is_compiling():
        codes, scale_inv = quantize_ops.quantize_experts(w, format.name)
        return ExpertWeights(codes, scale_inv, format)
    return weights_cuda.quantize(w, format)


def derive_columnwise_of_experts(
    rowwise: ExpertWeights, format: Float8Format, after: torch.Tensor
) -> ExpertWeights:
    """Columnwise codes of all experts: ``weights.derive_columnwise``. One node in compiled code.

    ``after`` keeps it in the backward pass, see ``ops.derive_columnwise_in_backward``.
    """
    if torch.compiler.is_compiling():
        data, scale_inv, own = rowwise
        codes, scales = quantize_ops.derive_columnwise_of_experts(
            data, scale_inv, after, own.name, format.name
        )
        return ExpertWeights(codes, scales, format)
    return weights_cuda.derive_columnwise(rowwise, format)


def rowwise_of_weights(w: torch.Tensor, format: Float8Format, transposed: bool) -> ExpertWeights:
    """Codes of weights in high precision, (E, N, K), or stored as (E, K, N) where ``transposed``."""
    if transposed:
        return brought_to_rows(quantize_experts(w, seen_transposed(format)), format)
    return quantize_experts(w, format)


def brought_to_rows(stored: ExpertWeights, format: Float8Format) -> ExpertWeights:
    """The rowwise operand of weights whose codes are stored transposed."""
    found = derive_columnwise_of_experts(stored, format, stored.scale_inv)
    # Row-major, as a Float8Linear's: GPUs take nothing else, and a CPU's sums depend on it.
    return found._replace(data=found.data.contiguous())
