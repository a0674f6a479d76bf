"""Grouped products, and what runs them; ``gemm/select.py`` chooses.

Two products serve a layer: of tokens with the weights of their expert, (M, K) x (E, N, K) -> (M, N), which are fprop
and dgrad; and over the tokens of each expert, (N, M) x (K, M) -> (E, N, K), which is wgrad.

Triton's are for Hopper; torch's own run in high precision.
"""

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from f8sub.formats import ALL, MULTIPLE, Float8Format, Operand, Tile
from f8sub.kernels.gemm.block_scales import BLOCK
from f8sub.kernels.gemm.blockwise import multiprocessors, why_not_device
from f8sub.kernels.gemm.tuning import GroupedConfig, Rows, default_grouped_config
from f8sub.kernels.grouped.operands import ExpertWeights, Groups, Tokens
from f8sub.kernels.triton import support
from f8sub.torch_compat import EXPERTS, aten_scaled_grouped_mm, problems

if TYPE_CHECKING:
    from f8sub.recipe import Recipe

TRITON_MULTIPLE = BLOCK
"""Groups that are summed over begin at multiples of so many rows."""


def why_not_triton(a: Float8Format, b: Float8Format, device: torch.device) -> str | None:
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


def triton_by_rows(
    a: Operand,
    b: Operand,
    rows: Rows,
    out_dtype: torch.dtype,
    fast_accum: bool,
    config: GroupedConfig | None = None,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """(M, K) x (E, N, K) -> (M, N), zeros in the rows past the last group: ``gemm_launch.product_by_rows``."""
    experts, cols, depth = b.data.shape
    # There is nothing to launch.
    if 0 in (rows.total, experts):
        return a.data.new_zeros((rows.total, cols), dtype=out_dtype)
    from f8sub.kernels.triton.gemm_launch import product_by_rows

    config = config or default_grouped_config(-(-depth // BLOCK), _by_block(b))
    return _run_triton(product_by_rows, a, b, rows, out_dtype, fast_accum, config, added=added)


def triton_over_rows(
    a: Operand,
    b: Operand,
    rows: Rows,
    out_dtype: torch.dtype,
    fast_accum: bool,
    config: GroupedConfig | None = None,
) -> torch.Tensor:
    """(N, M) x (K, M) -> (E, N, K): ``gemm_launch.product_over_rows``."""
    experts = len(rows.ends)
    if 0 in (experts, a.data.shape[1]):
        return a.data.new_zeros((experts, a.data.shape[0], b.data.shape[0]), dtype=out_dtype)
    from f8sub.kernels.triton.gemm_launch import product_over_rows

    config = config or default_grouped_config(None, _by_block(b))
    return _run_triton(product_over_rows, a, b, rows, out_dtype, fast_accum, config)


def clear_past(out: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """``out``, (M, N) and contiguous, with zeros in the rows past the last group."""
    if not support.takes(out) or not len(ends):
        row = torch.arange(len(out), device=ends.device, dtype=ends.dtype)
        last = ends[-1] if len(ends) else 0
        return out.masked_fill_((row >= last)[:, None], 0)
    from f8sub.kernels.triton import gemm_launch

    with support.device_of(out):
        gemm_launch.clearing(out, ends, multiprocessors(out.device)).run()
    return out


def _run_triton(
    product: Callable[..., Any],
    a: Operand,
    b: Operand,
    rows: Rows,
    *how: Any,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    # Imported where it runs, because installations without a GPU may lack Triton.
    from f8sub.kernels.triton.launch import Launches, run

    def make() -> Launches:
        more = () if added is None else (added,)
        launches, out = product(a, b, rows, *how, multiprocessors(a.data.device), *more)
        return Launches(launches, [out, launches[0].arguments["table_ptr"]], [])

    with support.device_of(a.data):
        # The formats, because shapes do not always tell what a scale serves.
        kind = product, a.format, b.format, rows.total, *how
        return run(kind, (*a.tensors, *b.tensors, *rows[:3], added), make)[0]


def _by_block(b: Operand) -> bool:
    tile = b.format.tile
    return tile.rows == 1 and tile.cols != ALL


OverRows = Callable[[Tokens, Tokens, Groups, torch.dtype, bool], torch.Tensor]


class GroupedBackend(NamedTuple):
    """A way to multiply by groups.

    Attributes:
        why_not: why it cannot run a product of two formats on a device; None when it can.
        rows: tokens with the weights of their expert, with zeros in the rows past the last group.
        weights: over the tokens of each expert.
        multiple: groups that are summed over begin at multiples of it.
        adds: whether ``rows`` takes a matrix that it adds to its rounded result, past its other arguments.
        rounds: whether results are made in bfloat16 alone.
    """

    why_not: Callable[[Float8Format, Float8Format, torch.device], str | None]
    rows: Callable[..., torch.Tensor]
    weights: OverRows
    multiple: int = 1
    adds: bool = False
    rounds: bool = False


def _why_not_scaled(a: Float8Format, b: Float8Format, device: torch.device) -> str | None:
    """Source: ``_scaled_grouped_mm`` in ATen/native/cuda/GroupedBlas.cpp."""
    if device.type != "cuda":
        return f"runs on cuda, not on {device.type}"
    if unknown_to := problems(EXPERTS):
        return f"is not known of torch {torch.__version__}: {'; '.join(unknown_to)}"
    if (capability := torch.cuda.get_device_capability(device))[0] not in (9, 10):
        return f"needs SM 9.0 (Hopper) or SM 10.0 (Blackwell), found {'.'.join(map(str, capability))}"
    known = Tile(1, ALL), Tile(ALL, ALL)
    if unknown := {str(f) for f in (a, b) if f.dtype != torch.float8_e4m3fn or f.tile not in known}:
        return f"takes e4m3 with one scale per row or per matrix, not {', '.join(sorted(unknown))}"
    return None


def _a_row(scale_inv: torch.Tensor, rows: int) -> torch.Tensor:
    """Scales of each group's rows, one after the other, of (groups, rows) or of (groups, 1)."""
    return scale_inv.expand(-1, rows).flatten()


def _scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scales: tuple[torch.Tensor, ...],
    ends: torch.Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    # The operator returns bfloat16 alone.
    product: torch.Tensor = aten_scaled_grouped_mm(
        a, b, *scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast_accum
    )
    return product.to(out_dtype)


def _scaled_rows(
    a: Tokens, b: ExpertWeights, groups: Groups, out_dtype: torch.dtype, fast_accum: bool
) -> torch.Tensor:
    a_scale, experts = a.scale_inv[:, 0], len(groups.ends)
    if a.edge == ALL:
        # torch takes a scale for each row of tokens, so each row gets its group's.
        a_scale = a_scale[groups.of_row().clamp(max=experts - 1)]
    b_scale = _a_row(b.scale_inv.flatten(1), b.data.shape[1]).view(experts, -1)
    # torch takes the second factor column-major: (N, K) row-major, seen transposed.
    weights = b.data.contiguous().transpose(1, 2)
    y = _scaled_mm(a.data, weights, (a_scale, b_scale), groups.ends, out_dtype, fast_accum)
    return clear_past(y, groups.ends)


def _scaled_weights(
    a: Tokens, b: Tokens, groups: Groups, out_dtype: torch.dtype, fast_accum: bool
) -> torch.Tensor:
    # What lies between two groups is zero, so each may end where the next one begins.
    ends = torch.cat([a.groups.first[1:], a.groups.first.new_full((1,), a.groups.rows)])
    scales = tuple(_a_row(one.scale_inv, one.data.shape[0]) for one in (a, b))
    return _scaled_mm(a.data.contiguous(), b.data.contiguous().t(), scales, ends, out_dtype, fast_accum)


def _triton_rows(
    a: Tokens,
    b: ExpertWeights,
    groups: Groups,
    out_dtype: torch.dtype,
    fast_accum: bool,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    left, right = Operand(a.data, a.scale_inv, a.format), Operand(b.data, b.scale_inv, b.format)
    rows = Rows(groups.first, groups.ends, a.groups.first, groups.rows)
    return triton_by_rows(left, right, rows, out_dtype, fast_accum, added=added)


def _triton_weights(
    a: Tokens, b: Tokens, groups: Groups, out_dtype: torch.dtype, fast_accum: bool
) -> torch.Tensor:
    # Scales of tokens have a row for each tile along the tokens, which is K here; an operand's have a column.
    left, right = (
        Operand(one.data, one.scale_inv if one.edge == ALL else one.scale_inv.t(), one.format)
        for one in (a, b)
    )
    first, ends, rows = a.groups
    return triton_over_rows(left, right, Rows(first, ends, first, rows), out_dtype, fast_accum)


def _read_as(out_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype that codes are dequantized to: a GPU's grouped products take bfloat16 alone."""
    return torch.bfloat16 if device.type == "cuda" else out_dtype


def _dequantized_rows(
    a: Tokens, b: ExpertWeights, groups: Groups, out_dtype: torch.dtype, fast_accum: bool
) -> torch.Tensor:
    dtype = _read_as(out_dtype, a.data.device)
    return high_precision_rows(a.dequantize(groups, dtype), b.dequantize(dtype), groups).to(out_dtype)


def _dequantized_weights(
    a: Tokens, b: Tokens, groups: Groups, out_dtype: torch.dtype, fast_accum: bool
) -> torch.Tensor:
    dtype = _read_as(out_dtype, a.data.device)
    dw = high_precision_weights(a.dequantize(groups, dtype), b.dequantize(groups, dtype), groups)
    return dw.to(out_dtype)


TRITON = GroupedBackend(why_not_triton, _triton_rows, _triton_weights, TRITON_MULTIPLE, adds=True)
SCALED = GroupedBackend(_why_not_scaled, _scaled_rows, _scaled_weights, MULTIPLE, rounds=True)
DEQUANTIZE = GroupedBackend(lambda a, b, device: None, _dequantized_rows, _dequantized_weights)

GemmNt = Callable[[Operand, Operand, torch.dtype, bool], torch.Tensor]
"""``a @ b.t()``: (M, K) x (N, K) -> (M, N) of a dtype, with or without fast accumulation."""


def _filled(groups: Groups) -> Iterator[tuple[int, int, int]]:
    """Yield the number, the first row and the end of each group that has rows; reads them on the host."""
    for index, (first, end) in enumerate(groups.host_bounds):
        if end > first:
            yield index, first, end


def _rows_one_by_one(
    gemm_nt: GemmNt,
    a: Tokens,
    b: ExpertWeights,
    groups: Groups,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """Each expert's product by itself, as a linear layer with that backend makes it."""
    out = a.scale_inv.new_zeros((groups.rows, b.data.shape[1]), dtype=out_dtype)
    placed = a.groups.host_bounds
    for index, first, end in _filled(groups):
        part = a.of_group(index, *placed[index])
        out[first:end] = gemm_nt(part, b.of_group(index), out_dtype, fast_accum)
    return out


def _weights_one_by_one(
    gemm_nt: GemmNt, a: Tokens, b: Tokens, groups: Groups, out_dtype: torch.dtype, fast_accum: bool
) -> torch.Tensor:
    shape = len(groups.ends), a.data.shape[0], b.data.shape[0]
    out = a.scale_inv.new_zeros(shape, dtype=out_dtype)
    placed = b.groups.host_bounds
    for index, first, end in _filled(a.groups):
        left, right = a.of_group(index, first, end), b.of_group(index, *placed[index])
        out[index] = gemm_nt(left, right, out_dtype, fast_accum)
    return out


def one_by_one(
    gemm_nt: GemmNt, why_not: Callable[[Float8Format, Float8Format, torch.device], str | None]
) -> GroupedBackend:
    """Each expert by itself, by a linear layer's product."""
    rows, weights = (functools.partial(run, gemm_nt) for run in (_rows_one_by_one, _weights_one_by_one))
    return GroupedBackend(why_not, rows, weights)


def high_precision_rows(x: torch.Tensor, w: torch.Tensor, groups: Groups) -> torch.Tensor:
    """(M, K) x (E, N, K) -> (M, N) in x's dtype, with zeros in the rows past the last group."""
    # On a GPU torch's grouped product takes bfloat16 alone.
    if x.is_cuda:
        y = torch.nn.functional.grouped_mm(x.bfloat16(), w.bfloat16().transpose(1, 2), offs=groups.ends)
        return clear_past(y.to(x.dtype), groups.ends)
    out = x.new_zeros((len(x), w.shape[1]))
    for index, first, end in _filled(groups):
        out[first:end] = torch.mm(x[first:end], w[index].t().to(x.dtype))
    return out


def high_precision_weights(dy: torch.Tensor, x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """(M, N) and (M, K), summed over each expert's rows -> (E, N, K) in dy's dtype."""
    if x.is_cuda:
        return torch.nn.functional.grouped_mm(dy.bfloat16().t(), x.bfloat16(), offs=groups.ends).to(dy.dtype)
    out = dy.new_zeros((len(groups.ends), dy.shape[1], x.shape[1]))
    for index, first, end in _filled(groups):
        out[index] = torch.mm(dy[first:end].t(), x[first:end].to(dy.dtype))
    return out


ONE_BY_ONE = "its formats pack codes or have a scale of the whole matrix, which groups of tokens have not"


def is_one_by_one(recipe: "Recipe") -> bool:
    """Return whether a recipe's experts are multiplied one after the other, see ``one_by_one``."""
    formats = [format for spec in (recipe.fprop, recipe.dgrad, recipe.wgrad) for format in (spec.a, spec.b)]
    return any(is_one_by_one_format(format) for format in formats if format is not None)


def is_one_by_one_format(format: Float8Format) -> bool:
    """Return whether a matrix of the format has codes for itself alone, not as a part of a larger one."""
    return format.codes_per_byte > 1 or format.scale_rule.has_global or format.hadamard is not None


def in_high_precision(x: torch.Tensor, w: torch.Tensor, groups: Groups) -> torch.Tensor:
    """(M, K) x (E, N, K) -> (M, N), with zeros in the rows past the last group, which torch leaves as they are.

    In dx, too. Both operands have one dtype, on a GPU bfloat16.
    """
    past = groups.past
    y = torch.nn.functional.grouped_mm(x.masked_fill(past, 0), w.transpose(1, 2), offs=groups.ends)
    return y.masked_fill(past, 0)
