"""Counts the float8 work of a stretch of code: matrices multiplied, and casts to float8 with the shapes cast."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import f8sub

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_MATMULS = (torch.ops.aten._scaled_mm, torch.ops.aten._scaled_mm_v2)
_PLAIN_MATMULS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
_EMPTY = (torch.ops.aten.empty_like, torch.ops.aten.new_empty, torch.ops.aten.new_zeros)


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
        self.matmuls += func.overloadpacket in _MATMULS
        self.plain_matmuls += func.overloadpacket in _PLAIN_MATMULS
        out = func(*args, **(kwargs or {}))
        if self._casts(func, args, out):
            self.casts.append(tuple(out.shape))
        return out

    @staticmethod
    def _casts(func, args, out) -> bool:
        """Whether ``out`` is float8 and made of a high-precision tensor, whatever the operator is called."""
        if not isinstance(out, torch.Tensor) or out.dtype not in FLOAT8 or func.overloadpacket in _EMPTY:
            return False
        read = args[1:] if func.overloadpacket is torch.ops.aten.copy_ else args
        return any(
            isinstance(arg, torch.Tensor) and arg.is_floating_point() and arg.dtype not in FLOAT8
            for arg in read
        )
