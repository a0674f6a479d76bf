"""Layer 1. The specification: plain PyTorch, any tile, any device, eager or compiled.

Every other kernel equals this one bitwise (casts, scales) or within the accumulation budget (GEMMs).
"""

import torch

from f8sub.formats import ALL, Float8Format, Operand, ScaleRule, Tile

LARGEST = 1.75 * 2.0**127
"""Clamp on high-precision values: the largest float32 that no float8 rounding carries beyond float32's range."""

LARGEST_SCALE = 2.0**126
"""Cap on scales: the largest power of two whose inverse is a normal float32."""

_EXPONENT_BITS = 0x7F800000


def amax(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Largest finite magnitude of each tile.

    Args:
        x: (rows, cols), any float dtype.
        tile: the blocks to reduce over.

    Returns:
        float32, ``tile.scale_shape(x.shape)``; 0 for a tile with no finite element. NaN and infinity take no
        part, so that one bad element does not decide the scale of its neighbours.
    """
    return _largest(torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0), tile)


def shard_amax(shard: torch.Tensor, tile: Tile, offset: tuple[int, int]) -> torch.Tensor:
    """Largest magnitude of every tile of a matrix that a shard of it touches.

    Args:
        shard: (rows, cols), the part of a larger matrix that begins at ``offset``.
        tile: the blocks of the larger matrix, which need not begin where the shard does.
        offset: row and column of the shard's first element.

    Returns:
        float32, one entry a touched tile, the first at ``first_tile(tile, offset)``; infinity where a tile holds
        NaN or infinity.
    """
    before = [
        0 if edge == ALL else start % edge for edge, start in zip((tile.rows, tile.cols), offset, strict=True)
    ]
    if any(before):
        shard = torch.nn.functional.pad(shard, (before[1], 0, before[0], 0))
    return torch.nan_to_num(_largest(shard, tile), nan=torch.inf, posinf=torch.inf)


def first_tile(tile: Tile, offset: tuple[int, int]) -> tuple[int, int]:
    """Index of the tile that the element at ``offset`` lies in."""
    row, col = (
        0 if edge == ALL else start // edge
        for edge, start in zip((tile.rows, tile.cols), offset, strict=True)
    )
    return row, col


def _largest(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    if x.numel() == 0:
        return x.new_zeros(tile.scale_shape((x.shape[0], x.shape[1])), dtype=torch.float32)
    a = x.abs()
    whole = [dim for dim, edge in enumerate((tile.rows, tile.cols)) if edge == ALL]
    if whole:
        a = a.amax(whole, keepdim=True)
    for dim, edge in enumerate((tile.rows, tile.cols)):
        if edge not in (1, ALL):
            missing = -a.shape[dim] % edge
            a = torch.nn.functional.pad(a, (0, missing) if dim == 1 else (0, 0, 0, missing))
            a = torch.unflatten(a, dim, (-1, edge)).amax(dim + 1)
    return a.float()


def scale_from_amax(amax: torch.Tensor, format: Float8Format) -> torch.Tensor:
    """The one rule from amax to scale: ``format.max / amax``, and 1 for a tile that is all zero.

    Args:
        amax: float32, any shape, finite.
        format: the format to cast to.

    Returns:
        float32 scales of the same shape, finite and with a finite inverse.

    Numerics:
        Divided in float64 and rounded once to float32, so that eager and compiled code agree to the bit.
        Powers of two are rounded down by clearing the mantissa, which is exact where ``exp2(floor(log2()))``
        is not.
    """
    scale = torch.div(torch.full_like(amax, format.max, dtype=torch.float64), amax)
    scale = scale.clamp(max=LARGEST_SCALE).float()
    if format.scale_rule is ScaleRule.POWER_OF_2:
        scale = (scale.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return torch.where(amax == 0, 1.0, scale)


def poison_non_finite(scale: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """``scale`` with NaN where ``amax`` is infinite, so that every code cast with it is NaN."""
    return scale.masked_fill(amax.isinf(), torch.nan)


def spread(
    scale: torch.Tensor, tile: Tile, shape: torch.Size, offset: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """``scale`` with each entry repeated over its tile, broadcastable to a matrix of ``shape``.

    Args:
        scale: one entry a tile of the whole matrix.
        tile: the blocks ``scale`` belongs to.
        shape: of the matrix, or of the part of it that begins at ``offset``.
        offset: row and column of that part's first element.
    """
    for dim, edge in enumerate((tile.rows, tile.cols)):
        if edge != ALL:
            first, last = offset[dim] // edge, -(-(offset[dim] + shape[dim]) // edge)
            scale = scale.narrow(dim, first, last - first)
            if edge > 1:
                scale = scale.repeat_interleave(edge, dim).narrow(dim, offset[dim] % edge, shape[dim])
    return scale


def cast(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes of ``x``: ``float32(x) * scale`` rounded to the nearest float8, ties to even.

    Args:
        x: (rows, cols), any float dtype.
        scale: float32, broadcastable to ``x``, see ``spread``.
        dtype: float8 dtype of the result.

    Returns:
        ``dtype``, (rows, cols), contiguous when ``x`` is.

    Numerics:
        Clamped explicitly: torch's own casts differ by version and dtype (2.13 on a CPU: e4m3 turns infinity
        into 448, e5m2 overflows to infinity). ``x - x`` is 0 for a finite element and NaN for any other, which
        keeps NaN and infinity visible, in place, as NaN codes; subtracted, so that -0 stays -0.
    """
    top = torch.finfo(dtype).max
    scaled = x.float().clamp(-LARGEST, LARGEST) * scale
    return (scaled.clamp(-top, top) - (x - x)).to(dtype)


def quantize(
    x: torch.Tensor,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    any_layout: bool = False,
) -> tuple[Operand | None, Operand | None]:
    """Both operands of a high-precision matrix, each with scales of its own current amax.

    Args:
        x: (rows, cols), any float dtype.
        rowwise: format of the operand stored as ``x``; None to leave it out.
        columnwise: format of the operand stored as ``x.t()``; None to leave it out.
        any_layout: leave the columnwise codes where they are and return a transposed view of them.

    Returns:
        (rowwise, columnwise). Where both formats scale the same elements together, one cast serves both.
    """
    row = None if rowwise is None else _quantize_as_stored(x, rowwise)
    if columnwise is None:
        return row, None
    seen_in_x = Float8Format(columnwise.dtype, columnwise.tile.t(), columnwise.scale_rule)
    same = row if row is not None and rowwise == seen_in_x else _quantize_as_stored(x, seen_in_x)
    return row, _transposed(same, columnwise, any_layout)


def derive_columnwise(rowwise: Operand, columnwise: Float8Format, any_layout: bool = False) -> Operand:
    """The columnwise operand made from rowwise codes; exact where ``why_not_derivable`` has no reason.

    Args:
        rowwise: (rows, cols) codes.
        columnwise: format of the (cols, rows) result.
        any_layout: see ``quantize``.
    """
    if rowwise.format.tile.is_transpose_of(columnwise.tile):
        return _transposed(rowwise, columnwise, any_layout)
    derived = quantize(dequantize(rowwise, torch.float32), None, columnwise, any_layout)[1]
    if derived is None:
        raise RuntimeError("quantize returned no columnwise operand for a columnwise format")
    return derived


def dequantize(operand: Operand, dtype: torch.dtype) -> torch.Tensor:
    """``codes * scale_inv`` in float32, rounded once to ``dtype``; shape of ``operand.data``."""
    data, scale_inv, format = operand
    # A code can stand for a little more than the largest number it was cast from.
    top = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return (data.float() * spread(scale_inv, format.tile, data.shape)).clamp(-top, top).to(dtype)


def gemm_nt(a: Operand, b: Operand, out_dtype: torch.dtype, fast_accum: bool) -> torch.Tensor:
    """``a @ b.t()`` of the dequantized operands in float32: (M, K) x (N, K) -> (M, N) in ``out_dtype``."""
    del fast_accum  # a property of tensor cores: float32 accumulation is what both settings promise at least
    return (dequantize(a, torch.float32) @ dequantize(b, torch.float32).t()).to(out_dtype)


def takes_any_layout(device: torch.device) -> bool:
    """Whether operands need not be row-major on ``device``."""
    del device
    return True


def why_not(a: Float8Format, b: Float8Format, device: torch.device) -> str | None:
    """Why this backend cannot run a GEMM of these formats on ``device``: it always can."""
    del a, b, device
    return None


def _quantize_as_stored(x: torch.Tensor, format: Float8Format) -> Operand:
    scale = scale_from_amax(amax(x, format.tile), format)
    data = cast(x, spread(scale, format.tile, x.shape), format.dtype).contiguous()
    return Operand(data, scale.reciprocal(), format)


def _transposed(operand: Operand, format: Float8Format, any_layout: bool) -> Operand:
    scale_inv = operand.scale_inv
    if scale_inv.numel() > 1:
        # flatten and view: contiguous() leaves a (1, n) scale's odd strides in place, which _scaled_mm refuses.
        scale_inv = scale_inv.t().flatten().view(scale_inv.shape[::-1])
    return Operand(operand.data.mT if any_layout else torch.t_copy(operand.data), scale_inv, format)
