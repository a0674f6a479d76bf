"""Cuts rows and columns out of a Float8Tensor, picks them one by one, and joins tensors.

Nothing is quantized again: a part has the data of the whole and its scales, so what it dequantizes to is the part of
what the whole does, to the bit. That takes a cut between tiles; where a tile spans the whole dimension any cut will do.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from f8sub.errors import Float8ConfigError, Float8ShapeError
from f8sub.formats import ALL, Operand
from f8sub.tensor.float8_tensor import Float8Tensor


class Axis(NamedTuple):
    """Names the rows or columns that an index of one dimension of a Float8Tensor stands for.

    Attributes:
        dim: 0 for rows of its matrix, 1 for columns.
        each: how many rows one index stands for, where a tensor has several leading dims; else 1.
    """

    dim: int
    each: int


def axis_of(tensor: Float8Tensor, dim: int) -> Axis | None:
    """Return the rows or columns that a dimension counts; None for a dimension between the first and the last."""
    if dim % tensor.dim() == tensor.dim() - 1:
        return Axis(1, 1)
    return Axis(0, math.prod(tensor.shape[1:-1])) if dim % tensor.dim() == 0 else None


def cut(tensor: Float8Tensor, axis: Axis, start: int, stop: int) -> Float8Tensor:
    """Return the part of a tensor from ``start`` to ``stop``; data of the usage that is cut along its rows are views.

    Args:
        tensor: of any shape.
        axis: what is cut.
        start: first index.
        stop: one past the last, at least ``start``.

    Raises:
        Float8ShapeError: a usage has a tile, or bytes, on both sides of the cut; says where it can be cut.
    """

    def apply(usage: str, operand: Operand, dim: int) -> Operand:
        # An empty part begins at 0, which is between tiles.
        first, last = (start * axis.each, stop * axis.each) if start < stop else (0, 0)
        multiple, whole = _multiple(operand, dim), operand.shape[dim]
        if any(place % multiple and place != whole for place in (first, last)):
            raise Float8ShapeError(
                f"{tensor!r} cannot be cut to {_named(axis)} {first} to {last}: its {usage} scales or bytes belong "
                f"to {multiple} {_named(axis)} each. Cut it at multiples of {multiple}{_otherwise(tensor, usage)}"
            )
        return _cut_operand(operand, dim, first, last)

    return _with_dim(tensor, axis, stop - start, apply)


def pick(tensor: Float8Tensor, axis: Axis, index: torch.Tensor) -> Float8Tensor:
    """Return copies of the rows or columns of ``index``, in its order.

    Args:
        tensor: of any shape.
        axis: what is picked.
        index: int64, (count,), not negative.

    Raises:
        Float8ShapeError: a usage has scales or bytes for several of them, but not for all.
    """
    if axis.each > 1:
        index = (
            # One index of the first dimension of (E, N, K) is N rows of the matrix [E * N, K].
            index[:, None] * axis.each + torch.arange(axis.each, dtype=index.dtype, device=index.device)
        ).flatten()

    def apply(usage: str, operand: Operand, dim: int) -> Operand:
        if (multiple := _multiple(operand, dim)) > 1:
            raise Float8ShapeError(
                f"{tensor!r} has no single {_named(axis)} to pick: its {usage} scales or bytes belong to {multiple} "
                f"{_named(axis)} each. Cut it by slices at multiples of {multiple}{_otherwise(tensor, usage)}"
            )
        scale_inv = operand.scale_inv
        if _edge(operand, dim) != ALL:
            scale_inv = _as_bytes(lambda scales: scales.index_select(dim, index), scale_inv)
        data = _as_bytes(lambda codes: codes.index_select(dim, index), operand.data)
        return operand._replace(data=data, scale_inv=scale_inv)

    return _with_dim(tensor, axis, len(index) // axis.each, apply)


def join(tensors: Sequence[Float8Tensor], axis: Axis) -> Float8Tensor:
    """Return tensors one after the other, in the usages that all of them have.

    Args:
        tensors: of one dtype, of formats that are the same, of shapes that differ in the joined dimension alone.
        axis: what they are joined along.

    Raises:
        Float8ConfigError: the dtypes or formats differ, or there is no usage that all have.
        Float8ShapeError: a tile would lie in two of them, or they have different scales where one is for all.
    """
    first = tensors[0]
    # Rows of the matrix are dim 0 of the rowwise operand (rows, cols), and dim 1 of the columnwise one (cols, rows).
    row = _join_operands([tensor.rowwise for tensor in tensors], axis.dim, "rowwise")
    col = _join_operands([tensor.columnwise for tensor in tensors], 1 - axis.dim, "columnwise")
    if (row is None and col is None) or len({tensor.dtype for tensor in tensors}) > 1:
        raise Float8ConfigError(
            f"cannot join {', '.join(map(repr, tensors))}: they have no usage in common, or other dtypes; join what "
            ".dequantize() returns"
        )
    leading = list(first.shape[:-1])
    if axis.dim == 0:
        leading[0] = sum(tensor.shape[0] for tensor in tensors)
    return Float8Tensor(row, col, first.dtype, leading)


def _with_dim(
    tensor: Float8Tensor, axis: Axis, size: int, apply: Callable[[str, Operand, int], Operand]
) -> Float8Tensor:
    """Apply a function to both usages, of which the columnwise one has rows and columns swapped."""
    row, col = (
        None if operand is None else apply(usage, operand, dim)
        for usage, operand, dim in (
            ("rowwise", tensor.rowwise, axis.dim),
            ("columnwise", tensor.columnwise, 1 - axis.dim),
        )
    )
    leading = (size, *tensor.shape[1:-1]) if axis.dim == 0 else tensor.shape[:-1]
    return Float8Tensor(row, col, tensor.dtype, leading)


def _cut_operand(operand: Operand, dim: int, start: int, stop: int) -> Operand:
    # nvfp4 has two elements in each byte of a row.
    in_a_place = operand.format.codes_per_byte if dim == 1 else 1
    # A view if rows are cut, a copy if columns are: GEMMs take contiguous rows.
    data = operand.data.narrow(dim, start // in_a_place, (stop - start) // in_a_place)
    scale_inv, edge = operand.scale_inv, _edge(operand, dim)
    if edge != ALL:
        tiles = -(-stop // edge) - start // edge
        # A copy: cuBLASLt reads no scales from any place in memory.
        scale_inv = scale_inv.narrow(dim, start // edge, tiles).clone(memory_format=torch.contiguous_format)
    return operand._replace(data=data.contiguous(), scale_inv=scale_inv)


def _join_operands(of_each: list[Operand | None], dim: int, usage: str) -> Operand | None:
    operands = [operand for operand in of_each if operand is not None]
    if len(operands) < len(of_each):
        return None
    first = operands[0]
    if any(operand.format != first.format for operand in operands):
        formats = ", ".join(str(operand.format) for operand in operands)
        raise Float8ConfigError(f"cannot join {usage} codes of {formats}; join what .dequantize() returns")
    multiple, sizes = _multiple(first, dim), [operand.shape[dim] for operand in operands]
    if any(size % multiple for size in sizes[:-1]):
        raise Float8ShapeError(
            f"cannot join {usage} codes of sizes {sizes}: {multiple} share scales or bytes, so that all but the last "
            f"have to be multiples of {multiple}; join what .dequantize() returns"
        )
    is_shared = _edge(first, dim) == ALL
    for operand in operands[1:]:
        is_same = not is_shared or _same_memory(first.scale_inv, operand.scale_inv)
        if not (is_same and _same_memory(first.global_scale_inv, operand.global_scale_inv)):
            raise Float8ShapeError(
                f"cannot join {usage} codes of {first.format}: each has a scale for all of its own, and together they "
                "would have one, as only parts of one tensor do; join what .dequantize() returns"
            )
    # Where one scale is for all, the loop above raised unless it is the same memory in each.
    scale_inv = first.scale_inv
    if not is_shared:
        scale_inv = _as_bytes(
            lambda *parts: torch.cat(parts, dim), *(operand.scale_inv for operand in operands)
        )
    data = _as_bytes(lambda *parts: torch.cat(parts, dim), *(operand.data for operand in operands))
    return first._replace(data=data, scale_inv=scale_inv)


def _same_memory(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Return whether two scales are one; compared by place, because comparing values waits for the device."""
    if a is None or b is None:
        return a is b
    is_same = a.shape == b.shape and a.storage_offset() == b.storage_offset()
    return is_same and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _as_bytes(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """Return ``function`` of the bytes of tensors, where they are bytes: torch copies those."""
    dtype = tensors[0].dtype
    if dtype.itemsize > 1:
        return function(*tensors)
    return function(*(tensor.view(torch.uint8) for tensor in tensors)).view(dtype)


def _edge(operand: Operand, dim: int) -> int:
    return (operand.format.tile.rows, operand.format.tile.cols)[dim]


def _multiple(operand: Operand, dim: int) -> int:
    """Return the number at whose multiples an operand can be cut along ``dim``: tiles and bytes stay whole."""
    edge, depth = _edge(operand, dim), operand.format.depth_multiple if dim == 1 else 1
    return depth if edge == ALL else math.lcm(edge, depth)


def _named(axis: Axis) -> str:
    return ("rows", "columns")[axis.dim]


def _otherwise(tensor: Float8Tensor, usage: str) -> str:
    """Return the end of an error about one usage: what else to do."""
    if tensor.rowwise is None or tensor.columnwise is None:
        return ", or cut what .dequantize() returns"
    return f", drop that usage with .update_usage({usage}=False), or cut what .dequantize() returns"
