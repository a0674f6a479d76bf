"""Handles each aten operator that a user may call on a Float8Tensor, one handler per meaning.

Transposes keep their float8 data, as views of rows do in training, and products of two Float8Tensors are float8 GEMMs.
Any other operator reads the high-precision values that the data stand for, with a warning once. So a module that reads
a weight itself computes the same whether FSDP2 gathers that weight in float8 or not, within what the rounding costs.

Operators that cut a Float8Tensor, pick rows or columns of it, or put parts together go by ``slicing.py``.
"""

import sys
import warnings
from typing import Any

import torch

from f8sub.errors import Float8ConfigError, Float8Warning
from f8sub.formats import Operand
from f8sub.kernels.gemm.select import gemm_nt, select_gemm
from f8sub.recipe import GemmSpec
from f8sub.tensor import slicing
from f8sub.tensor.float8_tensor import ANY_OTHER, Float8Tensor, implements
from f8sub.tensor.op_schema import describe
from f8sub.torch_compat import return_and_correct_aliasing, tree_leaves, tree_map_only

aten = torch.ops.aten

_warned: set[str] = set()
"""Operators that were warned about."""


@implements(ANY_OTHER)
def in_high_precision(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run any other operator on the values that the float8 data stand for, with a warning once per operator.

    Raises:
        NotImplementedError: it would write to float8 data.
    """
    for position, name in describe(func).written:
        value = args[position] if position < len(args) else kwargs.get(name)
        if written := [t for t in tree_leaves(value) if isinstance(t, Float8Tensor)]:
            raise NotImplementedError(
                f"{func} would write to {written[0]!r}, whose codes do not change; write to what .dequantize() "
                "returns, or to the sharded weight that it was gathered from"
            )
    # An operator that is composed of others, such as matmul of three dimensions, may reach one that has a handler.
    composed = func.decompose(*args, **kwargs)
    if composed is not NotImplemented:
        return composed
    read = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, Float8Tensor))
    if str(func) not in _warned:
        _warned.add(str(func))
        warnings.warn(
            f"{func} reads {read!r} in high precision: it is dequantized each time, {read.numel() * read.itemsize:,} "
            "bytes. That is right, and slower than a float8 layer. Where it is a weight that FSDP2 gathers, a module "
            "reads it outside of its layer: leave that layer out with skip=, or convert with float8_all_gather=False, "
            "if its time counts. Said once for each operator",
            Float8Warning,
            stacklevel=_frames_of_f8sub() + 1,
        )
    args, kwargs = tree_map_only(Float8Tensor, lambda t: t.dequantize(), (args, kwargs))
    return func(*args, **kwargs)


@implements(aten.t.default, aten.transpose.int, aten.permute.default)
def _swap_usages(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Transpose without moving bytes: rowwise and columnwise trade places. ``tensor.T`` is a permutation."""
    tensor, *dims = args
    if tensor.dim() != 2:
        return in_high_precision(func, args, kwargs)
    first, second = (0, dims[0][0]) if func is aten.permute.default else dims or (0, 1)
    if first % 2 == second % 2:
        # A dimension swapped with itself: the same matrix, as a new tensor.
        return aten.alias.default(tensor)
    out = Float8Tensor(tensor.columnwise, tensor.rowwise, tensor.dtype)
    return return_and_correct_aliasing(func, args, kwargs, out)


@implements(aten.copy_.default)
def _copy_from(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy a Float8Tensor's values into another tensor."""
    target, source, *others = args
    if isinstance(target, Float8Tensor):
        return in_high_precision(func, args, kwargs)
    return func(target, source.dequantize(), *others, **kwargs)


@implements(aten.zeros_like.default, aten.empty_like.default)
def _plain_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return high-precision tensors: what asks for them is a gradient or a buffer, which is not float8."""
    tensor: Float8Tensor = args[0]
    # The wrapper has no strides of its own: a meta tensor gives torch shape and dtype to follow.
    meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return func(meta, **{**kwargs, "device": kwargs.get("device") or tensor.device})


@implements(aten.mm.default, aten.matmul.default)
def _mm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multiply ``a @ b``: a's rows with b's columns."""
    a, b = args
    if not _are_matrices(a, b):
        return in_high_precision(func, args, kwargs)
    # y [M, N] = a [M, K] @ b [K, N]; b's columnwise operand is stored [N, K], as gemm_nt reads it.
    return _multiply(func, _usage(func, a, "rowwise"), _usage(func, b, "columnwise"), a.dtype)


@implements(aten.addmm.default)
def _addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute ``bias + a @ b``; the sum in high precision."""
    bias, a, b = args
    if kwargs or not _are_matrices(a, b):
        return in_high_precision(func, args, kwargs)
    return torch.add(bias, _mm(func, (a, b), {}))


@implements(aten.linear.default)
def _linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute ``x @ w.t() + bias``: rows of both. It comes here only where autograd is off, and else as addmm or mm."""
    x, w, bias = (*args, None)[:3]
    if not (isinstance(x, Float8Tensor) and isinstance(w, Float8Tensor)):
        return in_high_precision(func, args, kwargs)
    # x [..., K] as rows [M, K]
    rows = aten.view.default(x, (-1, x.shape[-1]))
    # y [M, N] = x [M, K] @ w [N, K].t()
    y = _multiply(func, _usage(func, rows, "rowwise"), _usage(func, w, "rowwise"), x.dtype)
    y = y.view(*x.shape[:-1], w.shape[0])
    return y if bias is None else y + bias


def _frames_of_f8sub() -> int:
    """Return how many frames of this package are on top of the stack, the caller's among them."""
    count = 0
    # So that the warning shows the line that reads the weight.
    while sys._getframe(count + 1).f_globals.get("__name__", "").startswith("f8sub."):
        count += 1
    return count


def _are_matrices(*tensors: torch.Tensor) -> bool:
    return all(isinstance(tensor, Float8Tensor) and tensor.dim() == 2 for tensor in tensors)


def _usage(func: Any, tensor: Float8Tensor, usage: str) -> Operand:
    operand: Operand | None = getattr(tensor, usage)
    if operand is None:
        raise Float8ConfigError(
            f"{func} reads the {usage} usage, which {tensor!r} lacks: quantize it with {usage}=True, or call "
            f".update_usage({usage}=True)"
        )
    return operand


def _multiply(func: Any, a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
    backend = select_gemm(GemmSpec(a=a.format, b=b.format), a.data.device)
    if backend is None:
        raise RuntimeError(f"{func}: no backend for two float8 operands")
    return gemm_nt(backend, a, b, dtype)


@implements(aten.slice.Tensor)
def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``tensor[3:7]`` and ``narrow``."""
    tensor, dim, *asked = (*args, 0)[:2] + args[2:]
    axis = slicing.axis_of(tensor, dim)
    if axis is None or kwargs:
        return in_high_precision(func, args, kwargs)
    start, stop, step = slice(*asked).indices(tensor.shape[dim])
    # A run of rows is cut, and may be a view; every second row has to be picked.
    if step == 1:
        out = slicing.cut(tensor, axis, start, max(start, stop))
        return return_and_correct_aliasing(func, args, kwargs, out)
    indices = torch.arange(start, stop, step, dtype=torch.int64, device=tensor.device)
    return slicing.pick(tensor, axis, indices)


@implements(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``split`` and ``chunk``."""
    tensor, sizes, dim = (*args, 0)[:3]
    dim = kwargs.get("dim", dim)
    axis, whole = slicing.axis_of(tensor, dim), tensor.shape[dim]
    if axis is None:
        return in_high_precision(func, args, kwargs)
    if isinstance(sizes, int):
        # As torch does, an empty dimension gives one empty part.
        sizes = [min(sizes, whole - start) for start in range(0, whole, sizes)] or [0]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [slicing.cut(tensor, axis, start, start + size) for start, size in zip(starts, sizes, strict=True)]


@implements(aten.index.Tensor, aten.index_select.default)
def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``tensor[rows]``, ``tensor[mask]`` of rows, and ``index_select``."""
    if func is aten.index.Tensor:
        tensor, indices = args
        index, dim = indices[0], 0
        is_of_rows = len(indices) == 1 and index.dim() == 1
    else:
        tensor, dim, index = args
        is_of_rows = True
    axis = slicing.axis_of(tensor, dim)
    if axis is None or not is_of_rows:
        return in_high_precision(func, args, kwargs)
    if index.dtype in (torch.bool, torch.uint8):
        # Waits for the device: how many rows a mask picks is not known before.
        index = index.nonzero().flatten()
    size = tensor.shape[dim]
    return slicing.pick(tensor, axis, torch.where(index < 0, index + size, index).long())


@implements(aten.cat.default)
def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``cat`` of Float8Tensors alone; with others among them, all are read in high precision."""
    tensors, dim = (*args, kwargs.get("dim", 0))[:2]
    axis = slicing.axis_of(tensors[0], dim) if isinstance(tensors[0], Float8Tensor) else None
    if axis is None or not all(isinstance(tensor, Float8Tensor) for tensor in tensors):
        return in_high_precision(func, args, kwargs)
    return slicing.join(tensors, axis)
