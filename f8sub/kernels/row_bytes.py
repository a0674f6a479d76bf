"""Rows in float8 as bytes, each row's scales behind its codes: what crosses where rows travel one by one.

One node of compiled code each, because there the number of rows is not known while code is traced.
"""

from typing import TYPE_CHECKING

import torch

from f8sub.formats import ALL, HIGH_PRECISION, Float8Format, Operand, present
from f8sub.kernels import reference
from f8sub.kernels.ops import operator
from f8sub.kernels.quantize import quantize
from f8sub.kernels.triton import support

if TYPE_CHECKING:
    from f8sub.kernels.triton.launch import Launch

ROWS, COLS = 8, 512
"""Of a program at a time; where scales belong to parts of a row, as many columns as those."""


def width(format: Float8Format, cols: int) -> int:
    """Return the bytes of a row of so many elements."""
    _, scales = format.tile.scale_shape((1, cols))
    return cols + scales * format.scale_rule.stored_as.itemsize


def _as_bytes(x: torch.Tensor, format: str) -> torch.Tensor:
    # Copied, not .contiguous(): one row, or one scale a row, is contiguous with any stride and offset, and views of
    # another element size want those of a new tensor.
    made = present(quantize(x.contiguous(), Float8Format.parse(format), None).rowwise)
    scales = made.scale_inv.clone(memory_format=torch.contiguous_format)
    # Codes and scales together: every rank would wait for a second collective, too.
    return torch.cat([made.data.view(torch.uint8), scales.view(torch.uint8)], 1)


def _fake_bytes(x: torch.Tensor, format: str) -> torch.Tensor:
    return x.new_empty((x.shape[0], width(Float8Format.parse(format), x.shape[1])), dtype=torch.uint8)


def of_bytes(
    rows: torch.Tensor, cols: int, format: str, dtype: torch.dtype, count: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what rows of bytes stand for, (M, ``cols``) in ``dtype``, which holds it exactly or nearly so.

    Args:
        rows: (M, at least ``width``), uint8; what is behind is not read.
        cols: elements of a row.
        format: a format's name.
        dtype: in high precision.
        count: int64, (1,): how many rows count, the others hold anything after; None for all.
    """
    parsed = Float8Format.parse(format)
    if _takes(rows, cols, parsed, dtype):
        out = rows.new_empty((rows.shape[0], cols), dtype=dtype)
        with support.device_of(rows):
            launching(rows, out, parsed, count).run()
        return out
    codes = rows[:, :cols].contiguous()
    scales = rows[:, cols : width(parsed, cols)].clone(memory_format=torch.contiguous_format)
    operand = Operand(codes.view(parsed.dtype), scales.view(parsed.scale_rule.stored_as), parsed)
    return reference.dequantize(operand, dtype)


def _takes(rows: torch.Tensor, cols: int, format: Float8Format, dtype: torch.dtype) -> bool:
    """Return whether the kernel reads these rows, whose scales are aligned then."""
    return (
        support.takes(rows)
        and dtype in HIGH_PRECISION
        and format.is_plain
        and format.tile.rows == 1
        and format.tile.cols in (ALL, support.EDGE)
        and rows.stride(1) == 1
        and all(each % 4 == 0 for each in (cols, rows.stride(0), rows.data_ptr()))
    )


def launching(
    rows: torch.Tensor, out: torch.Tensor, format: Float8Format, count: torch.Tensor | None
) -> "Launch":
    """Return the launch that fills ``out``, (M, N); see ``of_bytes``."""
    from f8sub.kernels.triton import row_bytes
    from f8sub.kernels.triton.launch import Launch
    from f8sub.kernels.triton.quantize_launch import CODES

    along = 0 if format.tile.cols == ALL else format.tile.cols
    arguments = {
        "bytes_ptr": rows,
        "count_ptr": count,
        "out_ptr": out,
        "M": out.shape[0],
        "N": out.shape[1],
        "STRIDE": rows.stride(0),
        "SOURCE": CODES[format.dtype],
        "ALONG": along,
        # As ``reference.dequantize`` clamps.
        "TOP": min(torch.finfo(out.dtype).max, torch.finfo(torch.float32).max),
        "ROWS": ROWS,
        "COLS": along or COLS,
    }
    return Launch(row_bytes.values_of_rows, -(-out.shape[0] // ROWS), arguments, {"num_warps": 4})


def _of_all_bytes(rows: torch.Tensor, cols: int, format: str, dtype: torch.dtype) -> torch.Tensor:
    return of_bytes(rows, cols, format, dtype)


def _fake_rows(rows: torch.Tensor, cols: int, format: str, dtype: torch.dtype) -> torch.Tensor:
    return rows.new_empty((rows.shape[0], cols), dtype=dtype)


rows_as_bytes = operator(_as_bytes, "rows_as_bytes", _fake_bytes)
rows_of_bytes = operator(_of_all_bytes, "rows_of_bytes", _fake_rows)
