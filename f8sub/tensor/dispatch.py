"""Layer 3. Every aten operator a Float8Tensor answers, one handler a meaning."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

from f8sub.backends import gemm_nt, select_gemm
from f8sub.errors import Float8ConfigError
from f8sub.formats import Operand
from f8sub.recipe import GemmSpec
from f8sub.tensor.float8_tensor import OPS, Float8Tensor, Handler

aten = torch.ops.aten


def implements(*ops: Any) -> Callable[[Handler], Handler]:
    """Enter a handler into the table; one operator has one handler."""

    def register(handler: Handler) -> Handler:
        for op in ops:
            if op in OPS:
                raise RuntimeError(f"{op} is already handled by {OPS[op]}")
            OPS[op] = handler
        return handler

    return register


@implements(aten.detach.default, aten.alias.default, aten.clone.default)
def _same_value(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = args[0].map_buffers(lambda buffer: func(buffer, *args[1:], **kwargs))
    return return_and_correct_aliasing(func, args, kwargs, out)


@implements(aten._to_copy.default)
def _to_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Move to another device; another dtype is another value, so it is refused."""
    tensor: Float8Tensor = args[0]
    if kwargs.get("dtype") not in (None, tensor.dtype):
        raise NotImplementedError(
            f"{tensor!r} to {kwargs['dtype']}: call .dequantize() and convert the high-precision result"
        )
    moved = {name: value for name, value in kwargs.items() if name != "dtype"}
    return tensor.map_buffers(lambda buffer: func(buffer, **moved))


@implements(aten.view.default, aten.as_strided.default)
def _view_of_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same rows under other leading dims. FSDP2 asks for an unsharded parameter's own, with its strides."""
    tensor, shape, *strided = args
    viewed = torch.empty(shape if strided else tensor.shape, device="meta")
    viewed = viewed if strided else viewed.view(shape)
    apart = strided and (
        tuple(strided[0]) != viewed.stride() or any(strided[1:]) or kwargs.get("storage_offset")
    )
    if viewed.shape[-1:] != tensor.shape[-1:] or viewed.numel() != tensor.numel() or apart:
        raise NotImplementedError(
            f"{func} of {tensor!r} to {tuple(shape)}: codes and scales cannot be viewed in another shape; "
            "call .dequantize() first"
        )
    out = tensor.map_buffers(aten.alias.default, leading=viewed.shape[:-1])
    return return_and_correct_aliasing(func, args, kwargs, out)


def _check_matrix(func: Any, tensor: Float8Tensor) -> None:
    if tensor.dim() != 2:
        raise NotImplementedError(
            f"{func} of {tensor!r}, which is no matrix: view it as one, (rows, {tensor.shape[-1]}), first"
        )


@implements(aten.t.default)
def _swap_usages(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Transposing moves no bytes: rowwise and columnwise trade places."""
    tensor: Float8Tensor = args[0]
    _check_matrix(func, tensor)
    out = Float8Tensor(tensor.columnwise, tensor.rowwise, tensor.dtype)
    return return_and_correct_aliasing(func, args, kwargs, out)


@implements(aten.transpose.int)
def _transpose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, first, second = args
    _check_matrix(func, tensor)
    if first % 2 == second % 2:
        return aten.alias.default(tensor)
    return aten.t.default(tensor)


@implements(aten.permute.default)
def _permute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``tensor.T`` calls."""
    tensor, dims = args
    return _transpose(func, (tensor, 0, 1 if dims[0] % 2 else 0), kwargs)


@implements(aten.zeros_like.default, aten.empty_like.default)
def _plain_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """High-precision tensors: what asks for them is a gradient or a buffer, which is not float8."""
    tensor: Float8Tensor = args[0]
    meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return func(meta, **{**kwargs, "device": kwargs.get("device") or tensor.device})


@implements(aten.mm.default, aten.matmul.default)
def _mm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``a @ b``: a's rows with b's columns."""
    a, b = args
    return _multiply(func, _usage(func, a, "rowwise"), _usage(func, b, "columnwise"), a.dtype)


@implements(aten.addmm.default)
def _addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``bias + a @ b``; the sum in high precision."""
    if kwargs:
        raise NotImplementedError(
            f"{func} of Float8Tensors with {sorted(kwargs)}: only bias + a @ b is defined"
        )
    bias, a, b = args
    return torch.add(bias, _mm(func, (a, b), {}))


@implements(aten.linear.default)
def _linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``x @ w.t() + bias``: rows of both. Seen whole only where autograd is off; it is addmm or mm otherwise."""
    x, w, bias = (*args, None)[:3]
    rows = aten.view.default(x, (-1, x.shape[-1]))
    y = _multiply(func, _usage(func, rows, "rowwise"), _usage(func, w, "rowwise"), x.dtype)
    y = y.view(*x.shape[:-1], w.shape[0])
    return y if bias is None else y + bias


def _usage(func: Any, tensor: torch.Tensor, usage: str) -> Operand:
    if not isinstance(tensor, Float8Tensor):
        raise NotImplementedError(
            f"{func} of a Float8Tensor and a {tensor.dtype} tensor: quantize the second one too, or call "
            ".dequantize() on the first"
        )
    _check_matrix(func, tensor)
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
