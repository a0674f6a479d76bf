"""Layer 1. The specification: plain PyTorch, any tile, any device, eager or compiled.

Every other kernel equals this one bitwise (casts, scales) or within the accumulation budget (GEMMs).

[Note] Numbers in compiled code. ``torch.compile(dynamic=True)`` turns each Python float that traced code reads from an
attribute or a global into an input of the graph. Dynamo (2.11 to 2.14) cannot pass such an input to two
``autograd.Function``s, which two float8 layers are. So traced code writes its floats as literals, in functions, or asks
``torch.finfo``; and reads floats that users choose (a margin, an eps) from strings, which dynamo takes for constants.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from f8sub.formats import ALL, E2M1, Float8Format, Operand, Rounding, Tile
from f8sub.kernels import e2m1
from f8sub.kernels.accumulate import matmul_nt

_EXPONENT_BITS = 0x7F800000


def largest_scale() -> float:
    """Cap on scales: the largest power of two whose inverse is a normal float32."""
    return 2.0**126


def smallest_scale() -> float:
    """The inverse of ``largest_scale``."""
    return 2.0**-126


def smallest_block_scale_inv() -> float:
    """Of scales of two levels: the smallest e4m3 there is, so that none is 0 and has no inverse."""
    return 2.0**-9


Across = Callable[[torch.Tensor, Tile], torch.Tensor]
"""Of a matrix that other ranks have more of: from the amaxes of the tiles of this rank's part, and what a tile is, to
those of the whole matrix's tiles, as this rank's part needs them."""


class Scales(NamedTuple):
    """The scales of one matrix.

    Attributes:
        scale: float32, one a tile, multiplies what is cast.
        scale_inv: see ``Operand``.
        global_scale_inv: see ``Operand``.
    """

    scale: torch.Tensor
    scale_inv: torch.Tensor
    global_scale_inv: torch.Tensor | None


def amax(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Largest finite magnitude of each tile.

    Args:
        x: (rows, cols), any float dtype.
        tile: the blocks to reduce over.

    Returns:
        float32, ``tile.scale_shape(x.shape)``; 0 for a tile with no finite element. NaN and infinity take no
        part, so that one bad element does not decide the scale of its neighbours.
    """
    return largest(torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0), tile)


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
    return torch.nan_to_num(largest(shard, tile), nan=torch.inf, posinf=torch.inf)


def first_tile(tile: Tile, offset: tuple[int, int]) -> tuple[int, int]:
    """Index of the tile that the element at ``offset`` lies in."""
    row, col = (
        0 if edge == ALL else start // edge
        for edge, start in zip((tile.rows, tile.cols), offset, strict=True)
    )
    return row, col


def largest(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Largest magnitude of each tile, as ``amax``; infinity or NaN where an element is."""
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


def scales_from_amax(amax: torch.Tensor, format: Float8Format) -> Scales:
    """All scales of one matrix, from the finite amaxes of all its tiles.

    Args:
        amax: float32, ``format.tile.scale_shape``, finite.
        format: the format to cast to.

    Numerics:
        Of two levels, the matrix's takes its amax to the largest e2m1 times the largest e4m3, the tile's what is
        left to the largest e2m1, rounded to e4m3 (arXiv 2509.25149, appendix C). Divided in float64, rounded to
        float32 and that to e4m3, as torch casts a float64.
    """
    if not format.scale_rule.has_global:
        scale = scale_from_amax(amax, format)
        # By way of float64: Triton's float32 division, which compiled code on CUDA takes, is off by an ulp at times.
        return Scales(scale, scale.double().reciprocal().float().to(format.scale_rule.stored_as), None)
    exact = amax.double()
    largest = exact.max() if exact.numel() else exact.new_zeros(())
    top = torch.finfo(torch.float8_e4m3fn).max
    smallest = 1.0 / (largest_scale() * smallest_block_scale_inv())
    global_inv = torch.where(largest == 0, 1.0, (largest / (format.max * top)).clamp(min=smallest)).float()
    block_inv = (exact / (format.max * global_inv.double())).clamp(smallest_block_scale_inv(), top)
    stored = torch.where(amax == 0, 1.0, block_inv).float().to(torch.float8_e4m3fn)
    scale = (stored.double() * global_inv).reciprocal().float()
    return Scales(scale, stored, global_inv.view(1, 1))


def scales_or_nan(amax: torch.Tensor, format: Float8Format) -> Scales:
    """``scales_from_amax``, NaN for a tile whose amax is infinite: its codes and values then all are NaN."""
    bad = amax.isinf()
    scale, scale_inv, global_scale_inv = scales_from_amax(amax.masked_fill(bad, 0.0), format)
    # Not every dtype of scales can be filled.
    scale_inv = scale_inv.float().masked_fill(bad, torch.nan).to(scale_inv.dtype)
    return Scales(scale.masked_fill(bad, torch.nan), scale_inv, global_scale_inv)


def scale_from_amax(amax: torch.Tensor, format: Float8Format) -> torch.Tensor:
    """The rule from amax to a scale of one level: ``format.max / amax``, and 1 for a tile that is all zero.

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
    scale = scale.clamp(max=largest_scale()).float()
    if format.scale_rule.is_power_of_2:
        scale = (scale.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return torch.where(amax == 0, 1.0, scale)


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


def cast(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, rounding: Rounding = Rounding.NEAREST
) -> torch.Tensor:
    """Codes of ``x``: ``float32(x) * scale`` rounded to a float8, or to an e2m1.

    Args:
        x: (rows, cols), any float dtype.
        scale: float32, broadcastable to ``x``, see ``spread``.
        dtype: dtype of the codes.
        rounding: for e2m1; float8 is rounded to the nearest, ties to even.

    Returns:
        (rows, cols) of ``dtype``, contiguous when ``x`` is; e2m1 codes as uint8, one an element.

    Numerics:
        Clamped explicitly: torch's own casts differ by version and dtype (2.13 on a CPU: e4m3 turns infinity
        into 448, e5m2 overflows to infinity). ``x - x`` is 0 for a finite element and NaN for any other, which
        keeps NaN and infinity visible, in place, as NaN codes; subtracted, so that -0 stays -0. e2m1 has no NaN:
        there the tile's scale is. Beyond 1.9 * 2**127 the nearest code can stand for 2**128, which float32 has not:
        ``dequantize`` makes float32's largest number of it.
    """
    scaled = x.float() * scale
    if dtype == E2M1:
        return e2m1.cast(scaled, rounding)
    top = torch.finfo(dtype).max
    return (scaled.clamp(-top, top) - (x - x)).to(dtype)


def codes_as_stored(x: torch.Tensor, scale: torch.Tensor, format: Float8Format) -> torch.Tensor:
    """``cast`` as ``Operand.data`` holds it: contiguous, two e2m1 codes in a byte."""
    codes = cast(x, scale, format.dtype, format.rounding)
    return e2m1.pack(codes) if format.dtype == E2M1 else codes.contiguous()


def quantize(
    x: torch.Tensor,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    any_layout: bool = False,
    across: Across | None = None,
) -> tuple[Operand | None, Operand | None]:
    """Both operands of a high-precision matrix, each with scales of its own current amax.

    Args:
        x: (rows, cols), any float dtype.
        rowwise: format of the operand stored as ``x``; None to leave it out.
        columnwise: format of the operand stored as ``x.t()``; None to leave it out.
        any_layout: leave the columnwise codes where they are and return a transposed view of them.
        across: for a part of a matrix, of formats of one level without packing; None for a whole one.

    Returns:
        (rowwise, columnwise). Where both formats scale the same elements together, one cast serves both.
    """
    row = None if rowwise is None else _quantize_as_stored(x, rowwise, rowwise.tile, across)
    if columnwise is None:
        return row, None
    if columnwise.depth_multiple > 1:
        # Bytes and transforms run along the other dimension than x's own.
        return row, _quantize_as_stored(x.t().contiguous(), columnwise, columnwise.tile)
    if row is None or not columnwise.is_transpose_of(row.format):
        seen = _quantize_as_stored(x, columnwise, columnwise.tile.t(), across)
        return row, transposed(seen, columnwise, any_layout)
    return row, transposed(row, columnwise, any_layout)


def derive_columnwise(rowwise: Operand, columnwise: Float8Format, any_layout: bool = False) -> Operand:
    """The columnwise operand made from rowwise codes; exact where ``why_not_derivable`` has no reason.

    Args:
        rowwise: (rows, cols) codes.
        columnwise: format of the (cols, rows) result.
        any_layout: see ``quantize``.
    """
    if rowwise.format.tile.is_transpose_of(columnwise.tile):
        return transposed(rowwise, columnwise, any_layout)
    derived = quantize(dequantize(rowwise, torch.float32), None, columnwise, any_layout)[1]
    if derived is None:
        raise RuntimeError("quantize returned no columnwise operand for a columnwise format")
    return derived


def dequantize(operand: Operand, dtype: torch.dtype) -> torch.Tensor:
    """``codes * scale_inv`` in float32, rounded once to ``dtype``, finite for all codes but NaN; ``operand.shape``."""
    values = _values(operand)
    if operand.format.hadamard is not None:
        values = e2m1.rotate(values, operand.format.hadamard, inverse=True)
    # A code can stand for a little more than the largest number it was cast from.
    top = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return values.clamp(-top, top).to(dtype)


def gemm_nt(a: Operand, b: Operand, out_dtype: torch.dtype, fast_accum: bool) -> torch.Tensor:
    """``a @ b.t()`` of what the codes stand for, in float32: (M, K) x (N, K) -> (M, N) in ``out_dtype``."""
    top = torch.finfo(torch.float32).max
    left, right = (_values(operand).clamp(-top, top) for operand in (a, b))
    return matmul_nt(left, right, fast_accum).to(out_dtype)


def takes_any_layout(device: torch.device) -> bool:
    """Whether operands need not be row-major on ``device``."""
    del device
    return True


def is_traceable(a: Operand, b: Operand) -> bool:
    """Whether ``torch.compile`` may look into this GEMM: it would unroll the partial sums."""
    del a, b
    return False


def why_not(a: Float8Format, b: Float8Format, device: torch.device) -> str | None:
    """Why this backend cannot run a GEMM of these formats on ``device``: it always can."""
    del a, b, device
    return None


def _quantize_as_stored(
    x: torch.Tensor, format: Float8Format, tile: Tile, across: Across | None = None
) -> Operand:
    """Codes and scales laid out as ``x`` is.

    ``tile`` is ``format.tile`` as it lies in ``x``: the transposed one, of a format that reads ``x`` by columns.
    """
    if missing := -x.shape[1] % format.depth_multiple:
        x = torch.nn.functional.pad(x, (0, missing))
    if format.hadamard is not None:
        x = e2m1.rotate(x, format.hadamard)
    if format.dtype == E2M1:
        # It has no NaN: a non-finite element shows in its tile's scale.
        scales = scales_or_nan(shard_amax(x, tile, (0, 0)), format)
    else:
        amaxes = amax(x, tile)
        scales = scales_from_amax(amaxes if across is None else across(amaxes, tile), format)
    data = codes_as_stored(x, spread(scales.scale, tile, x.shape), format)
    return Operand(data, scales.scale_inv, format, scales.global_scale_inv)


def _values(operand: Operand) -> torch.Tensor:
    """float32 values of the codes as a GEMM reads them, a Hadamard transform still in them; ``operand.shape``."""
    data, scale_inv, format, global_scale_inv = operand
    codes = e2m1.values(e2m1.unpack(data)) if format.dtype == E2M1 else data.float()
    values = codes * spread(scale_inv.float(), format.tile, codes.shape)
    # A code times a scale of one byte is exact: this rounds once, too.
    return values if global_scale_inv is None else values * global_scale_inv


def transposed(operand: Operand, format: Float8Format, any_layout: bool) -> Operand:
    """The same codes stored transposed, or seen so where ``any_layout``; read as ``format`` says."""
    codes, scale_inv, _, global_scale_inv = operand
    if scale_inv.numel() != 1:
        # flatten and view: contiguous() leaves a (1, n) scale's odd strides in place, which _scaled_mm refuses.
        scale_inv = scale_inv.t().flatten().view(scale_inv.shape[::-1])
    if format.dtype is E2M1:
        data = e2m1.pack(e2m1.unpack(codes).t())
    else:
        data = codes.t() if any_layout else torch.t_copy(codes)
    return Operand(data, scale_inv, format, global_scale_inv)
