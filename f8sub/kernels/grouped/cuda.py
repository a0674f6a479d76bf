"""Quantizers of tokens in groups and of experts' weights on CUDA; the specification for everything else.

A matrix of tokens is read once for both usages, and all experts' weights are cast in one launch. All of them are
bitwise equal to ``operands``, so none is asked for by name.
"""

from typing import TYPE_CHECKING

import torch

from f8sub.formats import ALL, HIGH_PRECISION, MULTIPLE, Float8Format, Operand
from f8sub.kernels import cuda
from f8sub.kernels.grouped import operands
from f8sub.kernels.grouped.operands import (
    ExpertWeights,
    Groups,
    Tokens,
    aligned_rows,
    empty_codes,
    empty_scale_inv,
    start_of_groups,
)
from f8sub.kernels.triton import support
from f8sub.kernels.triton.support import EDGE, EXPONENT_VECTOR, ROWWISE, VECTOR

if TYPE_CHECKING:
    from f8sub.kernels.triton.launch import Launches


MOST_GROUPS = 1024
"""That one program of ``lay_out`` holds; torch's grouped products take 1023."""


def why_no_kernel(format: Float8Format) -> str | None:
    """Why no kernel casts groups to a format; None where one does."""
    if is_of_exponents(format):
        return None
    return support.why_no_kernel(format)


def is_of_exponents(format: Float8Format) -> bool:
    """Whether one exponent byte serves 32 elements of a row, as Blackwell's tensor cores read them."""
    return format.scale_rule.stored_as == torch.float8_e8m0fnu and format.tile == EXPONENT_VECTOR


def quantize_tokens(
    x: torch.Tensor,
    groups: Groups,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    multiple: int = 1,
) -> tuple[Tokens | None, Tokens | None]:
    """``operands.quantize_tokens`` of both operands of groups in a row; goes there for what no kernel takes."""
    if rowwise is not None and columnwise is not None and rowwise != columnwise:
        return quantize_tokens(x, groups, rowwise, None)[0], quantize_tokens(
            x, groups, None, columnwise, multiple
        )[1]
    if not _takes(x, groups, rowwise, columnwise, multiple):
        return (
            None if rowwise is None else operands.quantize_tokens(x, groups, rowwise, contracted=False),
            None
            if columnwise is None
            else operands.quantize_tokens(x, groups, columnwise, contracted=True, multiple=multiple),
        )
    if columnwise is None and rowwise is not None and rowwise.tile in (ROWWISE, VECTOR):
        # No tile knows of a group.
        made = cuda.quantize(x, rowwise, None).rowwise
        return (None if made is None else Tokens(made.data, made.scale_inv, rowwise, groups, False)), None
    from f8sub.kernels.triton import launch

    x, ends = x.contiguous(), groups.ends.contiguous()
    with support.device_of(x):
        tensors = launch.run(
            ("groups", rowwise, columnwise, multiple),
            (x, ends),
            lambda: token_launches(x, ends, rowwise, columnwise, multiple),
        )
    # First rows and ends of what is laid out come before the table.
    first, laid_ends = tensors[-3], tensors[-2]
    row = col = None
    if rowwise is not None:
        is_laid_out = rowwise.tile.rows not in (1, ALL)
        found = Groups(first, laid_ends, len(tensors[0])) if is_laid_out else groups
        row = Tokens(tensors[0], tensors[1], rowwise, found, False)
    if columnwise is not None:
        data, scale_inv = tensors[-5:-3]
        col = Tokens(data, scale_inv, columnwise, Groups(first, laid_ends, data.shape[1]), True)
    return row, col


def token_launches(
    x: torch.Tensor,
    ends: torch.Tensor,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    multiple: int,
) -> "Launches":
    """How kernels make the operands of one format, of groups that follow each other; they fill what is made here."""
    format = rowwise or columnwise
    if format is None:
        raise RuntimeError("asked to quantize for no usage")
    tile = format.tile
    is_square = tile.rows == tile.cols != ALL
    is_laid_out = is_square or columnwise is not None
    edge = tile.cols if tile == EXPONENT_VECTOR else MULTIPLE
    if is_laid_out:
        edge = start_of_groups(tile.cols, multiple)
    given = Groups(ends, ends, len(x))
    laid = Groups(torch.empty_like(ends), torch.empty_like(ends), aligned_rows(len(x), len(ends), edge))
    row = col = None
    if rowwise is not None:
        of_rows = laid if is_square else given
        data = x.new_empty((of_rows.rows, x.shape[1]), dtype=rowwise.dtype)
        row = Operand(data, empty_scale_inv(x, rowwise, of_rows, contracted=False), rowwise)
    if columnwise is not None:
        data = x.new_empty((x.shape[1], laid.rows), dtype=columnwise.dtype)
        col = Operand(data, empty_scale_inv(x, columnwise, laid, contracted=True), columnwise)
    where = (laid.first, laid.ends) if is_laid_out else None
    from f8sub.kernels.triton import quantize_grouped_launch

    return quantize_grouped_launch.quantization(x, ends, row, col, edge, laid.rows, where)


def _takes(
    x: torch.Tensor,
    groups: Groups,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    multiple: int,
) -> bool:
    formats = [format for format in (rowwise, columnwise) if format is not None]
    start = MULTIPLE if columnwise is None else start_of_groups(columnwise.tile.cols, multiple)
    is_square = bool(formats) and formats[0].tile.rows == formats[0].tile.cols != ALL
    return (
        x.dtype in HIGH_PRECISION
        and support.takes(x)
        and not any(why_no_kernel(format) for format in formats)
        # Rows begin at multiples of 16 bytes, and so do the groups of columnwise codes.
        and x.shape[1] % MULTIPLE == 0
        and start % MULTIPLE == 0
        and (is_square or start & (start - 1) == 0)
        and 0 < len(groups.ends) <= MOST_GROUPS
    )


def quantize_weights(w: torch.Tensor, format: Float8Format) -> ExpertWeights:
    """``operands.quantize_weights``; goes there for what no kernel takes. Experts may have any stride."""
    if w.dtype not in HIGH_PRECISION or not support.takes(w) or why_no_kernel(format):
        return operands.quantize_weights(w, format)
    count, rows, cols = w.shape
    tile = format.tile
    if tile.is_whole or (tile.rows == tile.cols and tile.rows % EDGE == 0):
        if not w[0].is_contiguous():
            w = w.contiguous()
        from f8sub.kernels.triton import launch

        with support.device_of(w):
            made = launch.run(format, (w,), lambda: weight_launches(w, format))
        return ExpertWeights(made[0], made[1], format)
    # No tile knows of an expert.
    flat = w.reshape(count * rows, cols)
    if is_of_exponents(format):
        one = Groups.of(torch.full((1,), len(flat), dtype=torch.int32, device=w.device), len(flat))
        codes, _ = quantize_tokens(flat, one, format, None)
        found = None if codes is None else (codes.data, codes.scale_inv)
    else:
        operand = cuda.quantize(flat, format, None).rowwise
        found = None if operand is None else (operand.data, operand.scale_inv)
    if found is None:
        raise RuntimeError("quantize returned no rowwise codes for a rowwise format")
    data, scale_inv = found
    return ExpertWeights(data.view(w.shape), scale_inv.unflatten(0, (count, rows)), format)


def derive_columnwise(rowwise: ExpertWeights, format: Float8Format) -> ExpertWeights:
    """``operands.derive_columnwise``; goes there for what no kernel takes. Kernels make contiguous codes."""
    codes, scale_inv, own = rowwise
    if not (support.takes(codes) and derives(rowwise, format)):
        return operands.derive_columnwise(rowwise, format)
    from f8sub.kernels.triton import launch

    given = rowwise._replace(scale_inv=scale_inv.contiguous())
    with support.device_of(codes):
        made = launch.run((own, format), (codes, given.scale_inv), lambda: derivation_launches(given, format))
    return ExpertWeights(made[0], made[1], format)


def weight_launches(w: torch.Tensor, format: Float8Format) -> "Launches":
    """How kernels make rowwise codes; they fill what is made here."""
    from f8sub.kernels.triton import quantize_grouped_launch

    return quantize_grouped_launch.weight_quantization(w, Operand(*empty_codes(w, format)))


def derivation_launches(rowwise: ExpertWeights, format: Float8Format) -> "Launches":
    """How kernels make columnwise codes; they fill what is made here."""
    from f8sub.kernels.triton import quantize_grouped_launch

    derived = Operand(*empty_codes(rowwise.data.transpose(1, 2), format))
    return quantize_grouped_launch.weight_derivation(Operand(*rowwise), derived)


def derives(rowwise: ExpertWeights, format: Float8Format) -> bool:
    """Whether a kernel makes columnwise codes of a format of rowwise ones."""
    codes, _, own = rowwise
    transposes = own.tile.is_transpose_of(format.tile) and (own.tile.is_whole or own.tile.rows % EDGE == 0)
    recasts = own.tile == format.tile == ROWWISE
    in_words = codes.shape[1] % 2 == codes.shape[2] % 2 == 0 and codes.data_ptr() % 2 == 0
    is_plain = own.is_plain and format.is_plain
    return is_plain and codes.is_contiguous() and in_words and (transposes or recasts)
