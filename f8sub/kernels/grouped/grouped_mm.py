"""Our own products by groups, for Hopper: rows with the matrix of their group, and sums over the rows of each."""

from collections.abc import Callable
from typing import Any

import torch

from f8sub.formats import ALL, Float8Format, Operand, Tile
from f8sub.kernels.gemm.block_scales import BLOCK
from f8sub.kernels.gemm.blockwise import multiprocessors, why_not_device
from f8sub.kernels.gemm.grouped_gemm_config import Config, Rows, default_config
from f8sub.kernels.triton import support

MULTIPLE = BLOCK
"""Groups that are summed over begin at multiples of so many rows."""


def why_not(a: Float8Format, b: Float8Format, device: torch.device) -> str | None:
    """Why these kernels do not multiply operands of two formats on a device; None where they do."""
    if not a.is_plain or not b.is_plain:
        return f"takes float8 with float32 scales of one level, not {a} and {b}"
    if unknown := {str(f.tile) for f in (a, b) if not _is_read(f.tile)}:
        return (
            f"takes one scale a group or a row, or tiles of 1x{BLOCK} and of whole {BLOCK}x{BLOCK}, not "
            f"{', '.join(sorted(unknown))}"
        )
    return why_not_device(device)


def _is_read(tile: Tile) -> bool:
    if tile.cols == ALL:
        return tile.rows in (1, ALL)
    return tile.cols % BLOCK == 0 and (tile.rows == 1 or (tile.rows != ALL and tile.rows % BLOCK == 0))


def by_rows(
    a: Operand,
    b: Operand,
    rows: Rows,
    out_dtype: torch.dtype,
    fast_accum: bool,
    config: Config | None = None,
) -> torch.Tensor:
    """(M, K) x (E, N, K) -> (M, N), zeros in the rows past the last group: ``grouped_gemm_launch.product_by_rows``."""
    experts, cols, depth = b.data.shape
    if 0 in (rows.total, experts):
        return a.data.new_zeros((rows.total, cols), dtype=out_dtype)
    from f8sub.kernels.triton.grouped_gemm_launch import product_by_rows

    config = config or default_config(-(-depth // BLOCK), _by_block(b))
    return _run(product_by_rows, a, b, rows, out_dtype, fast_accum, config)


def over_rows(
    a: Operand,
    b: Operand,
    rows: Rows,
    out_dtype: torch.dtype,
    fast_accum: bool,
    config: Config | None = None,
) -> torch.Tensor:
    """(N, M) x (K, M) -> (E, N, K): ``grouped_gemm_launch.product_over_rows``."""
    experts = len(rows.ends)
    if 0 in (experts, a.data.shape[1]):
        return a.data.new_zeros((experts, a.data.shape[0], b.data.shape[0]), dtype=out_dtype)
    from f8sub.kernels.triton.grouped_gemm_launch import product_over_rows

    config = config or default_config(None, _by_block(b))
    return _run(product_over_rows, a, b, rows, out_dtype, fast_accum, config)


def clear_past(out: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """``out``, (M, N) and contiguous, with zeros in the rows past the last group."""
    if not support.takes(out) or not len(ends):
        row = torch.arange(len(out), device=ends.device, dtype=ends.dtype)
        last = ends[-1] if len(ends) else 0
        return out.masked_fill_((row >= last)[:, None], 0)
    from f8sub.kernels.triton import grouped_gemm_launch

    with support.device_of(out):
        grouped_gemm_launch.clearing(out, ends, multiprocessors(out.device)).run()
    return out


def _run(product: Callable[..., Any], a: Operand, b: Operand, rows: Rows, *how: Any) -> torch.Tensor:
    from f8sub.kernels.triton.prepared import Made, run

    def make() -> Made:
        launches, out = product(a, b, rows, *how, multiprocessors(a.data.device))
        return Made(launches, [out, launches[0].arguments["table_ptr"]], [])

    with support.device_of(a.data):
        kind = product, a.format, b.format, rows.total, *how
        return run(kind, (*a.tensors, *b.tensors, *rows[:3]), make)[0]


def _by_block(b: Operand) -> bool:
    tile = b.format.tile
    return tile.rows == 1 and tile.cols != ALL
