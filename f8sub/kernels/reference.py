"""The specification: plain PyTorch, any tile, any device, eager or compiled.

Every other kernel equals this one bitwise (casts, scales) or within the accumulation budget (GEMMs).

[Note] Numbers in compiled code. ``torch.compile(dynamic=True)`` turns each Python float that traced code reads from an
attribute or a global into an input of the graph. Dynamo (2.11 to 2.14) cannot pass such an input to two
``autograd.Function``s, and two float8 layers are that. So traced code writes its floats as literals, in functions, or
asks ``torch.finfo``; it reads floats that users choose (a margin, an eps) from strings, which are constants to dynamo.
"""

import typing
from typing import NamedTuple

import torch

from f8sub.formats import ALL, E2M1, Float8Format, Operand, Rounding, Tile
from f8sub.kernels import fp4, scales
from f8sub.kernels.scales import PriorScale, ReduceAmax, Scales

PROMOTION = 128
"""Elements of K in one partial sum. Source: DeepGEMM, CUTLASS's default for split accumulation, cuBLAS.

Hopper's tensor cores keep about 14 bits of a partial sum (arXiv 2412.19437, 3.3.2). Without fast accumulation a kernel
moves it to a float32 register every 128 elements of K; the reference adds in the same order.
"""


class Quantized(NamedTuple):
    """The operands stored as a matrix and as its transpose, None where not asked for.

    ``amax`` is float32, (1, 1): the largest magnitude, infinity or NaN where an element is; None without a prior scale
    or without a usage.
    """

    rowwise: Operand | None
    columnwise: Operand | None
    amax: torch.Tensor | None = None


def spread(
    scale: torch.Tensor, tile: Tile, shape: torch.Size, offset: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """The scales of a matrix's tiles, each repeated over its tile: broadcastable to a matrix of ``shape``.

    Or of the part of that ``shape`` that begins at ``offset``, its row and column.
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
    """Codes of ``x``: ``float32(x) * scale`` rounded to a float8, to the nearest, ties to even; or to an e2m1.

    ``x`` is (rows, cols), of any float dtype, and ``scale`` float32, broadcastable to it, see ``spread``. Codes of
    e2m1 are uint8, one an element, rounded as ``rounding`` says.

    Clamped explicitly: torch's own casts differ by version and dtype (2.13 on a CPU: e4m3 turns infinity into 448, e5m2
    overflows to infinity). And Inductor may round x in the kernel of the amax and not in that of the cast.
    ``x * 0`` is 0 for a finite element and NaN for any other, which keeps NaN and infinity visible, in place, as NaN
    codes; its sign is that of ``x``, so that -0 stays -0. e2m1 has no NaN: there the tile's scale is. Beyond
    1.9 * 2**127 the nearest code can stand for 2**128, which float32 has not: ``dequantize`` makes float32's largest
    number of it.
    """
    exact = x.float()
    scaled = exact * scale
    if dtype == E2M1:
        return fp4.cast(scaled, rounding)
    top = torch.finfo(dtype).max
    # Not ``x - x``: where x is a product, Triton fuses that to the product's rounding error.
    return (scaled.clamp(-top, top) + exact * 0.0).to(dtype)


def codes_as_stored(x: torch.Tensor, scale: torch.Tensor, format: Float8Format) -> torch.Tensor:
    """``cast`` as ``Operand.data`` holds it: contiguous, two e2m1 codes in a byte."""
    codes = cast(x, scale, format.dtype, format.rounding)
    return fp4.pack(codes) if format.dtype == E2M1 else codes.contiguous()


def quantize(
    x: torch.Tensor,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    any_layout: bool = False,
    prior: PriorScale | None = None,
    reduce: ReduceAmax | None = None,
) -> Quantized:
    """Both operands of a high-precision matrix; one cast serves both where they scale the same elements together.

    Args:
        x: (rows, cols), any float dtype.
        rowwise: format of the operand stored as ``x``; None to leave it out.
        columnwise: the same, stored as ``x.t()``.
        any_layout: leave the columnwise codes where they are and return a transposed view of them.
        prior: a scale that was made before, for formats with one scale a matrix; what it cannot hold saturates. None
            for scales of the current amax.
        reduce: for a part of a matrix, in formats of one level without packing; None for a whole one.
    """
    row = largest = None
    if rowwise is not None:
        row, largest = _as_stored(x, rowwise, rowwise.tile, prior, reduce)
    if columnwise is None:
        return Quantized(row, None, largest)
    if columnwise.depth_multiple > 1:
        # Bytes and transforms run along the other dimension than x's own.
        return Quantized(row, _as_stored(x.t().contiguous(), columnwise, columnwise.tile)[0])
    seen = row
    if seen is None or not columnwise.is_transpose_of(seen.format):
        seen, largest = _as_stored(x, columnwise, columnwise.tile.t(), prior, reduce)
    return Quantized(row, transposed(seen, columnwise, any_layout), largest)


def cast_into(
    out: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    format: Float8Format,
    offset: tuple[int, int],
    through: torch.dtype,
) -> None:
    """Codes of a part of a matrix, with scales that are known.

    Args:
        out: uint8, (rows, at least as many columns as the codes take); the rest is left alone.
        x: (rows, cols), any float dtype.
        scale: float32, the scales of all tiles of the matrix, in the shape that ``format`` has them.
        format: the format of the codes.
        offset: the row and column of the matrix that the part begins at.
        through: the dtype that ``x`` is rounded to first.
    """
    codes = codes_as_stored(x.to(through), spread(scale, format.tile, x.shape, offset), format)
    out[:, : codes.shape[1]] = codes.view(torch.uint8)


def refuse_freed(codes: torch.Tensor) -> None:
    """Raise RuntimeError where FSDP2 has freed the codes of a gathered weight: kernels would read memory of others."""
    if codes.numel() and not codes.untyped_storage().size():
        raise RuntimeError(
            f"backward reads the codes of a gathered weight of shape {tuple(codes.shape)}, which FSDP2 has freed and "
            "did not gather again: set_unshard_in_backward(False) is for modules whose backward needs no weight"
        )


def derive_columnwise(rowwise: Operand, columnwise: Float8Format, any_layout: bool = False) -> Operand:
    """The columnwise operand, (cols, rows), of (rows, cols) codes; ``any_layout`` as in ``quantize``.

    Exact where ``why_not_derivable`` has no reason.
    """
    if rowwise.format.tile.is_transpose_of(columnwise.tile):
        return transposed(rowwise, columnwise, any_layout)
    values = dequantize(rowwise, torch.float32)
    return typing.cast(Operand, quantize(values, None, columnwise, any_layout).columnwise)


def dequantize(operand: Operand, dtype: torch.dtype) -> torch.Tensor:
    """``codes * scale_inv`` in float32, rounded once to ``dtype``, finite for all codes but NaN; ``operand.shape``."""
    values = _values(operand)
    if operand.format.hadamard is not None:
        values = fp4.rotate(values, operand.format.hadamard, inverse=True)
    # A code can stand for a little more than the largest number it was cast from.
    top = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return values.clamp(-top, top).to(dtype)


def gemm_nt(a: Operand, b: Operand, out_dtype: torch.dtype, fast_accum: bool) -> torch.Tensor:
    """``a @ b.t()`` of what the codes stand for, in float32: (M, K) x (N, K) -> (M, N) in ``out_dtype``."""
    # As in ``dequantize``: a code can stand for a little more than float32's largest number.
    top = torch.finfo(torch.float32).max
    left, right = (_values(operand).clamp(-top, top) for operand in (a, b))
    return matmul_nt(left, right, fast_accum).to(out_dtype)


def matmul_nt(a: torch.Tensor, b: torch.Tensor, fast_accum: bool) -> torch.Tensor:
    """``a @ b.t()`` of float32 matrices: (M, K) x (N, K) -> (M, N).

    With ``fast_accum`` one sum over all of K; else partial sums of ``PROMOTION`` elements, added in float32. In float64
    where torch was told to round the factors of float32 products (``set_float32_matmul_precision``): a code times its
    scale has more bits than TF32 keeps.
    """
    backend = torch.backends.cuda if a.is_cuda else torch.backends.mkldnn
    if backend.matmul.fp32_precision in ("tf32", "bf16"):
        a, b = a.double(), b.double()
    depth = max(a.shape[1], 1) if fast_accum else PROMOTION
    total = a.new_zeros((a.shape[0], b.shape[0]))
    for part_of_a, part_of_b in zip(a.split(depth, 1), b.split(depth, 1), strict=True):
        add_partial_sum(total, part_of_a, part_of_b)
    return total


def add_partial_sum(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add ``a @ b.t()`` to ``total``, in place: the one thing that a narrower accumulator would do differently."""
    total.addmm_(a, b.t())


def _as_stored(
    x: torch.Tensor,
    format: Float8Format,
    tile: Tile,
    prior: PriorScale | None = None,
    reduce: ReduceAmax | None = None,
) -> tuple[Operand, torch.Tensor | None]:
    """Codes and scales laid out as ``x`` is, and ``Quantized.amax``.

    ``tile`` is ``format.tile`` as it lies in ``x``: transposed for a format that reads ``x`` by columns.
    """
    if missing := -x.shape[1] % format.depth_multiple:
        x = torch.nn.functional.pad(x, (0, missing))
    if format.hadamard is not None:
        x = fp4.rotate(x, format.hadamard)
    made, largest = _scales(x, format, tile, prior, reduce)
    data = codes_as_stored(x, spread(made.scale, tile, x.shape), format)
    return Operand(data, made.scale_inv, format, made.global_scale_inv), largest


def _scales(
    x: torch.Tensor, format: Float8Format, tile: Tile, prior: PriorScale | None, reduce: ReduceAmax | None
) -> tuple[Scales, torch.Tensor | None]:
    if format.dtype == E2M1:
        # It has no NaN: a non-finite element shows in its tile's scale.
        return scales.scales_or_nan(scales.shard_amax(x, tile, (0, 0)), format), None
    amax = scales.amax(x, tile)
    if prior is None:
        return scales.scales_from_amax(amax if reduce is None else reduce(amax, tile), format), None
    largest = scales.largest(x, tile)
    if reduce is not None:
        # What a collective makes of NaN is its own.
        both = torch.stack((amax, largest.nan_to_num(nan=torch.inf, posinf=torch.inf)))
        amax, largest = reduce(both, tile).unbind()
    return scales.with_inverse(scales.scale_now(prior, amax, format)), largest


def _values(operand: Operand) -> torch.Tensor:
    """float32 values of the codes as a GEMM reads them, a Hadamard transform still in them; ``operand.shape``."""
    data, scale_inv, format, global_scale_inv = operand
    codes = fp4.values(fp4.unpack(data)) if format.dtype == E2M1 else data.float()
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
        return Operand(fp4.pack(fp4.unpack(codes).t()), scale_inv, format, global_scale_inv)
    data = codes.t() if any_layout else torch.t_copy(codes)
    return Operand(data, scale_inv, format, global_scale_inv)
