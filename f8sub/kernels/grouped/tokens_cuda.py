"""Quantizers of tokens in groups on CUDA: one read of a matrix for both usages; the specification for everything else.

All of them are bitwise equal to ``tokens.quantize``, so none is asked for by name.
"""

from typing import TYPE_CHECKING

import torch

from f8sub.formats import ALL, HIGH_PRECISION, MULTIPLE, Float8Format, Operand
from f8sub.kernels import cuda
from f8sub.kernels.grouped import tokens
from f8sub.kernels.grouped.groups import Groups, aligned_rows, start_of_groups
from f8sub.kernels.grouped.tokens import Tokens, empty_scale_inv
from f8sub.kernels.triton import support
from f8sub.kernels.triton.support import EXPONENT_VECTOR, ROWWISE, VECTOR

if TYPE_CHECKING:
    from f8sub.kernels.triton.prepared import Made

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


def quantize(
    x: torch.Tensor,
    groups: Groups,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    multiple: int = 1,
) -> tuple[Tokens | None, Tokens | None]:
    """Both operands of groups that follow each other: ``tokens.quantize``; goes there for what no kernel takes."""
    if rowwise is not None and columnwise is not None and rowwise != columnwise:
        return quantize(x, groups, rowwise, None)[0], quantize(x, groups, None, columnwise, multiple)[1]
    if not _takes(x, groups, rowwise, columnwise, multiple):
        return (
            None if rowwise is None else tokens.quantize(x, groups, rowwise, contracted=False),
            None
            if columnwise is None
            else tokens.quantize(x, groups, columnwise, contracted=True, multiple=multiple),
        )
    if columnwise is None and rowwise is not None and rowwise.tile in (ROWWISE, VECTOR):
        # No tile knows of a group.
        made = cuda.quantize(x, rowwise, None).rowwise
        return (None if made is None else Tokens(made.data, made.scale_inv, rowwise, groups, False)), None
    from f8sub.kernels.triton import prepared

    x, ends = x.contiguous(), groups.ends.contiguous()
    with support.device_of(x):
        tensors = prepared.run(
            ("groups", rowwise, columnwise, multiple),
            (x, ends),
            lambda: launches(x, ends, rowwise, columnwise, multiple),
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


def launches(
    x: torch.Tensor,
    ends: torch.Tensor,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    multiple: int,
) -> "Made":
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
