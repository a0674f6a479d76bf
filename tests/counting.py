"""Counts the float8 work of a stretch of code: matrices multiplied, and casts to float8 with the shapes cast."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import f8sub

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_MATMULS = (torch.ops.aten._scaled_mm, torch.ops.aten._scaled_mm_v2)
_PLAIN_MATMULS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)


class Float8Work(TorchDispatchMode):
    """``matmuls`` in float8, ``plain_matmuls`` in high precision, ``casts``: the shape of every cast to float8."""

    def __init__(self) -> None:
        super().__init__()
        self.matmuls = 0
        self.plain_matmuls = 0
        self.casts: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, f8sub.Float8Tensor) for kind in types):
            return NotImplemented  # to its own table, from where the operators on the codes come back here
        kwargs = kwargs or {}
        self.matmuls += func.overloadpacket in _MATMULS
        self.plain_matmuls += func.overloadpacket in _PLAIN_MATMULS
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in FLOAT8:
            self.casts.append(tuple(args[0].shape))
        return func(*args, **kwargs)
