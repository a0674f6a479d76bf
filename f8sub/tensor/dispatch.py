"""The operators that training itself runs on a Float8Tensor: views of rows, copies, moves to another device.

``features/tensors`` adds those that users call, and what any other operator does (``ANY_OTHER``).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

from f8sub.tensor.float8_tensor import ANY_OTHER, OPS, Float8Tensor, Handler

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
    """Move to another device; of another dtype are high-precision values alone."""
    tensor: Float8Tensor = args[0]
    if kwargs.get("dtype") not in (None, tensor.dtype):
        return OPS[ANY_OTHER](func, args, kwargs)
    moved = {name: value for name, value in kwargs.items() if name != "dtype"}
    return tensor.map_buffers(lambda buffer: func(buffer, **moved))


@implements(aten.view.default, aten.as_strided.default)
def _view_of_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same rows under other leading dims. FSDP2 asks for an unsharded parameter's own, with its strides."""
    tensor, shape, *strided = args
    viewed = torch.empty(shape if strided else tensor.shape, dtype=tensor.dtype, device="meta")
    viewed = viewed if strided else viewed.view(shape)
    apart = strided and (
        tuple(strided[0]) != viewed.stride() or any(strided[1:]) or kwargs.get("storage_offset")
    )
    if viewed.shape[-1:] != tensor.shape[-1:] or viewed.numel() != tensor.numel() or apart:
        return OPS[ANY_OTHER](func, args, kwargs)
    out = tensor.map_buffers(aten.alias.default, leading=viewed.shape[:-1])
    return return_and_correct_aliasing(func, args, kwargs, out)
