"""Operators that cut a Float8Tensor, pick rows or columns of it, or put parts together."""

from typing import Any

import torch

from f8sub.tensor import slicing
from f8sub.tensor.aten_ops import in_high_precision
from f8sub.tensor.float8_tensor import Float8Tensor, implements
from f8sub.torch_compat import return_and_correct_aliasing

aten = torch.ops.aten


@implements(aten.slice.Tensor)
def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``tensor[3:7]``, ``narrow``."""
    tensor, dim, *asked = (*args, 0)[:2] + args[2:]
    lines = slicing.lines_of(tensor, dim)
    if lines is None or kwargs:
        return in_high_precision(func, args, kwargs)
    start, stop, step = slice(*asked).indices(tensor.shape[dim])
    if step == 1:
        out = slicing.cut(tensor, lines, start, max(start, stop))
        return return_and_correct_aliasing(func, args, kwargs, out)
    indices = torch.arange(start, stop, step, dtype=torch.int64, device=tensor.device)
    return slicing.pick(tensor, lines, indices)


@implements(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``split``, ``chunk``."""
    tensor, sizes, dim = (*args, 0)[:3]
    dim = kwargs.get("dim", dim)
    lines, whole = slicing.lines_of(tensor, dim), tensor.shape[dim]
    if lines is None:
        return in_high_precision(func, args, kwargs)
    if isinstance(sizes, int):
        sizes = [min(sizes, whole - start) for start in range(0, whole, sizes)] or [0]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        slicing.cut(tensor, lines, start, start + size) for start, size in zip(starts, sizes, strict=True)
    ]


@implements(aten.index.Tensor, aten.index_select.default)
def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``tensor[rows]`` and ``tensor[mask]`` of rows, ``index_select``."""
    if func is aten.index.Tensor:
        tensor, indices = args
        index, dim = indices[0], 0
        is_of_rows = len(indices) == 1 and index.dim() == 1
    else:
        tensor, dim, index = args
        is_of_rows = True
    lines = slicing.lines_of(tensor, dim)
    if lines is None or not is_of_rows:
        return in_high_precision(func, args, kwargs)
    if index.dtype in (torch.bool, torch.uint8):
        index = index.nonzero().flatten()
    size = tensor.shape[dim]
    return slicing.pick(tensor, lines, torch.where(index < 0, index + size, index).long())


@implements(aten.cat.default)
def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``cat`` of Float8Tensors alone; of others too, all are read in high precision."""
    tensors, dim = (*args, kwargs.get("dim", 0))[:2]
    lines = slicing.lines_of(tensors[0], dim) if isinstance(tensors[0], Float8Tensor) else None
    if lines is None or not all(isinstance(tensor, Float8Tensor) for tensor in tensors):
        return in_high_precision(func, args, kwargs)
    return slicing.join(tensors, lines)
