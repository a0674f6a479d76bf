"""Experts' operands, by the fastest kernel that takes them; all of them agree to the bit. One node in compiled code.

Casts with a scale an expert that was made before, in plain PyTorch on any device, eager or compiled.

Each expert has the codes, scales and amax that ``reference.quantize`` makes of its own matrix with its prior scale. An
expert without tokens has the amax 0. Nothing is read on the host.
"""

from typing import NamedTuple

import torch

from f8sub.formats import ALL, Float8Format
from f8sub.kernels import reference
from f8sub.kernels.grouped import cuda, ops
from f8sub.kernels.grouped.operands import ExpertWeights, Groups, Tokens, laid_out, seen_transposed
from f8sub.kernels.scales import PriorScale, scale_now, with_inverse


def quantize_tokens(
    x: torch.Tensor, groups: Groups, format: Float8Format, *, contracted: bool, multiple: int = 1
) -> Tokens:
    """``operands.quantize_tokens``."""
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
        return ops.quantized_groups(x, groups, rowwise, columnwise, multiple)
    return cuda.quantize_tokens(x, groups, rowwise, columnwise, multiple)


def quantize_experts(w: torch.Tensor, format: Float8Format) -> ExpertWeights:
    """Rowwise codes of all experts: ``operands.quantize_weights``. One node in compiled code."""
    if torch.compiler.is_compiling():
        codes, scale_inv = ops.quantize_experts(w, format.name)
        return ExpertWeights(codes, scale_inv, format)
    return cuda.quantize_weights(w, format)


def derive_columnwise_of_experts(
    rowwise: ExpertWeights, format: Float8Format, after: torch.Tensor
) -> ExpertWeights:
    """Columnwise codes of all experts: ``operands.derive_columnwise``. One node in compiled code.

    ``after`` keeps it in the backward pass, see ``ops.derive_columnwise_in_backward``.
    """
    if torch.compiler.is_compiling():
        data, scale_inv, own = rowwise
        codes, scales = ops.derive_columnwise_of_experts(data, scale_inv, after, own.name, format.name)
        return ExpertWeights(codes, scales, format)
    return cuda.derive_columnwise(rowwise, format)


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


class CastTokens(NamedTuple):
    """Both operands of tokens, None where not asked for.

    ``amax`` is float32, (E, 1): infinity where an expert has an element that is not finite; None without a prior scale.
    """

    rowwise: Tokens | None
    columnwise: Tokens | None
    amax: torch.Tensor | None


def cast_tokens(
    x: torch.Tensor,
    groups: Groups,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    multiple: int,
    prior: PriorScale | None,
) -> CastTokens:
    """``quantize_both``, with the prior scales, (E, 1), where there are any; then the formats are one."""
    format = rowwise or columnwise
    if prior is None or format is None:
        return CastTokens(*quantize_both(x, groups, rowwise, columnwise, multiple), None)
    of_row, count = groups.of_row(), len(groups.ends)
    magnitude = x.abs().float().nan_to_num(nan=torch.inf, posinf=torch.inf)
    both = torch.stack((magnitude.masked_fill(magnitude.isinf(), 0.0), magnitude), 1).amax(2)
    # Rows past the last group are of one group more.
    found = both.new_zeros(count + 1, 2).scatter_reduce_(0, of_row[:, None].expand_as(both), both, "amax")
    finite, amax = found[:count].split(1, 1)
    made = with_inverse(scale_now(prior, finite, format))
    of_each = torch.cat([made.scale, made.scale.new_ones(1, 1)])[of_row]
    codes = reference.cast(x, of_each, format.dtype)
    row = None if rowwise is None else Tokens(codes, made.scale_inv, rowwise, groups, False)
    if columnwise is None:
        return CastTokens(row, None, amax)
    where = laid_out(groups, ALL, multiple)
    if where is not groups:
        flat = codes.view(torch.uint8)
        flat = torch.cat([flat, flat.new_zeros(1, x.shape[1])])[where.source_in(groups)]
        codes = flat.view(format.dtype)
    return CastTokens(row, Tokens(codes.t(), made.scale_inv, columnwise, where, True), amax)


def cast_weights(w: torch.Tensor, format: Float8Format, prior: PriorScale) -> ExpertWeights:
    """Codes of ``w``, (E, N, K), with the prior scales, (E, 1)."""
    amax = w.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().amax((1, 2)).float()[:, None]
    made = with_inverse(scale_now(prior, amax, format))
    codes = reference.cast(w, made.scale[:, :, None], format.dtype).contiguous()
    return ExpertWeights(codes, made.scale_inv[:, :, None], format)
