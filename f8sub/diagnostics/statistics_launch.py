"""The launches that compare a matrix with its codes; triton is imported when they are made."""

from typing import TYPE_CHECKING

import torch

from f8sub.formats import ALL, E2M1, Operand

if TYPE_CHECKING:
    from f8sub.kernels.triton.launch import Launch

FINITE = torch.finfo(torch.float32).max


def has_kernel(operand: Operand) -> bool:
    """Whether the kernels read its codes: of a byte, under scales of one level."""
    plain = operand.format.dtype != E2M1 and operand.format.hadamard is None
    return plain and operand.global_scale_inv is None


def launches_of(
    values: torch.Tensor,
    operand: Operand,
    scale_inv: torch.Tensor,
    step: int,
    sums: torch.Tensor,
    maxima: torch.Tensor,
    constants: dict[str, float],
) -> "list[Launch]":
    """The launches that add what one matrix has to ``sums`` and ``maxima``; see ``statistics.add_measured``.

    Args:
        values: (rows, cols), in the dtype that was cast.
        operand: its codes, which ``has_kernel`` takes.
        scale_inv: its scales, float32.
        step: a row of so many is looked at; amax and scales are of all.
        sums: a contiguous row of ``statistics.WIDTH`` numbers.
        maxima: a contiguous row of three.
        constants: what ``measure_rows`` is told of formats and of the histogram.
    """
    from f8sub.diagnostics import statistics_kernels
    from f8sub.kernels.triton.launch import Launch
    from f8sub.kernels.triton.quantize_launch import CODES

    # A matrix whose rows have gaps is read as it lies; one that lies otherwise is not.
    values = values if values.stride(1) == 1 else values.contiguous()
    codes = operand.data if operand.data.stride(1) == 1 else operand.data.contiguous()
    rows, tile = -(-values.shape[0] // step), operand.format.tile
    of_rows = torch.empty(2, rows, dtype=torch.float32, device=values.device)
    amax = torch.linalg.vector_norm(values, torch.inf)
    low, high = (scale_inv, scale_inv) if scale_inv.numel() == 1 else torch.aminmax(scale_inv)
    measured = {
        "values_ptr": values,
        "codes_ptr": codes.view(torch.uint8),
        "scale_inv_ptr": scale_inv,
        "sums_ptr": sums,
        "of_rows_ptr": of_rows,
        "cols": values.shape[1],
        "value_stride": values.stride(0),
        "code_stride": codes.stride(0),
        "scale_row_stride": scale_inv.stride(0),
        "scale_col_stride": scale_inv.stride(1),
        "step": step,
        "rows": rows,
        "SOURCE": CODES[operand.format.dtype],
        "LARGEST": operand.format.max,
        "TILE_ROWS": 0 if tile.rows == ALL else tile.rows,
        "TILE_COLS": 0 if tile.cols == ALL else tile.cols,
        "FINITE": FINITE,
        "BLOCK": 1024,
        **constants,
    }
    added = {
        "of_rows_ptr": of_rows,
        "amax_ptr": amax,
        "lowest_scale_inv_ptr": low,
        "largest_scale_inv_ptr": high,
        "sums_ptr": sums,
        "maxima_ptr": maxima,
        "rows": rows,
        "count": rows * values.shape[1],
        "SIGNAL": constants["COUNTS"] + 4,
        "BLOCK": 1024,
    }
    return [
        Launch(statistics_kernels.measure_rows, rows, measured, {"num_warps": 4}),
        Launch(statistics_kernels.add_rows, 1, added, {"num_warps": 4}),
    ]
