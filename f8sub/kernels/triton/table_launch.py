"""The launches over many matrices: which program reads what of which of them."""

from collections.abc import Sequence
from typing import Any

import torch

from f8sub.formats import Float8Format
from f8sub.kernels.scales import PriorScale
from f8sub.kernels.triton import tables
from f8sub.kernels.triton.launch import INPUTS, cdiv
from f8sub.kernels.triton.launcher import Launch
from f8sub.kernels.triton.quantize_cuda import EDGE
from f8sub.kernels.triton.shard_amaxes import Matrix

BLOCK = 4096
"""Elements that a program has in registers: 32 of each of its threads."""

SPAN = 16384
"""Elements of a line that a program reads, so that it has as many as one that reads a square of 128."""

SCALES = 1024
"""Entries of the table that a program makes scales of."""

_DTYPES = {dtype: number for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16))}


def amaxes(matrices: Sequence[Matrix], table: torch.Tensor) -> list[Launch]:
    """How to take the amaxes of matrices: ``scales.shard_amax`` of each, in one launch, or two.

    Matrices whose lines do not begin at multiples of 16 bytes have a launch of their own.

    Args:
        matrices: those that ``many.takes``, on one device.
        table: float32, (entries,); zeros where amaxes are written to.
    """
    aligned = [matrix for matrix in matrices if _is_aligned(matrix)]
    others = [matrix for matrix in matrices if not _is_aligned(matrix)]
    return [_amaxes(some, table, some is aligned) for some in (aligned, others) if some]


def scales(
    amax: torch.Tensor,
    prior: PriorScale | None,
    scale: torch.Tensor,
    scale_inv: torch.Tensor,
    format: Float8Format,
    through: torch.dtype,
) -> Launch:
    """How to make the scales of amaxes, see ``many.scales``."""
    arguments = {
        "amax_ptr": amax,
        "prior_ptr": None if prior is None else prior.scale,
        "scale_ptr": scale,
        "scale_inv_ptr": scale_inv,
        "SIZE": amax.numel(),
        "TOP": format.max,
        "POWER_OF_2": format.scale_rule.is_power_of_2,
        "THROUGH": INPUTS[through],
        "HEADROOM": 1.0 if prior is None else 2.0**prior.margin,
        "BLOCK": SCALES,
    }
    return Launch(tables.scales_of_many, cdiv(amax.numel(), SCALES), arguments, {"num_warps": 4})


def _amaxes(matrices: list[Matrix], table: torch.Tensor, aligned: bool) -> Launch:
    rows: list[list[int]] = []
    counts: list[int] = []
    for matrix in matrices:
        fields, programs = _fields(matrix)
        rows.append([fields[0], sum(counts), *fields[1:]])
        counts.append(programs)
    device = matrices[0].data.device
    indices = torch.arange(len(rows), dtype=torch.int32, device="cpu")
    of_program = indices.repeat_interleave(torch.tensor(counts, dtype=torch.int64, device="cpu"))
    arguments: dict[str, Any] = {
        "matrices_ptr": _sent(torch.tensor(rows, dtype=torch.int64, device="cpu"), device),
        "matrix_of_program_ptr": _sent(of_program, device),
        "amax_ptr": table.view(torch.int32),
        "BLOCK": BLOCK,
        "SPAN": SPAN,
        "PART": EDGE,
        "ALIGNED": aligned,
    }
    return Launch(tables.amaxes_of_many, sum(counts), arguments, {"num_warps": 4})


def _fields(matrix: Matrix) -> tuple[list[int], int]:
    """What the kernel is told of a matrix but its first program, and how many programs read it."""
    data, tile, offset, entry, entry_stride = matrix
    (rows, cols), stride = data.shape, data.stride(0)
    where = [data.data_ptr(), _DTYPES[data.dtype]]
    if matrix.is_of_lines:
        if tile.is_whole and data.is_contiguous():
            rows, cols = 1, data.numel()
        entry_stride = 0 if tile.is_whole else entry_stride
        return [*where, rows, cols, stride, 0, 0, 0, 0, entry, entry_stride], rows * cdiv(cols, SPAN)
    before = [start % edge for start, edge in zip(offset, (tile.rows, tile.cols), strict=True)]
    parts = cdiv(before[0] + rows, EDGE)
    parts *= cdiv(before[1] + cols, tile.cols) * (tile.cols // EDGE)
    fields = [*where, rows, cols, stride, tile.rows, tile.cols, *before, entry, entry_stride]
    return fields, parts


def _is_aligned(matrix: Matrix) -> bool:
    """Whether all that a program reads begins at a multiple of 16 bytes, and is as many whole ones."""
    fields, _ = _fields(matrix)
    address, _, rows, cols, stride, _, _, _, cols_before, *_ = fields
    in_lines = cols % 16 == 0 and cols_before % 16 == 0 and (rows == 1 or stride % 16 == 0)
    return address % 16 == 0 and in_lines


def _sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On ``device``; the host does not wait for it."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
