"""Counts the float8 work of a stretch of code: matrices multiplied, and casts to float8 with the shapes cast."""

from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import f8sub
from f8sub.kernels.gemm import select

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2)
"""What codes are stored as."""

_CAST_TO = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
"""What codes are cast to: e2m1 codes are made as uint8, one an element, and packed."""

_MATMULS = (torch.ops.aten._scaled_mm, torch.ops.aten._scaled_mm_v2)
_PLAIN_MATMULS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_, torch.ops.aten.bmm)
_EMPTY = (torch.ops.aten.empty_like, torch.ops.aten.new_empty, torch.ops.aten.new_zeros)


class Float8Work(TorchDispatchMode):
    """``matmuls`` in float8, ``plain_matmuls`` in high precision, ``casts``: the shape of every cast to float8.

    A product of the reference counts as one matmul, whatever it is made of. A cast of scales to e4m3 is a cast.
    """

    def __init__(self) -> None:
        super().__init__()
        self.matmuls = 0
        self.scaled_matmuls = 0
        self.plain_matmuls = 0
        self.casts: list[tuple[int, ...]] = []
        self._in_reference = False

    def __enter__(self):
        backend = select.GEMM["reference"]
        gemm_nt = backend.gemm_nt

        def counted(*args):
            self.matmuls += 1
            self._in_reference = True
            product = gemm_nt(*args)
            self._in_reference = False
            return product

        self._patch = mock.patch.object(backend, "gemm_nt", counted)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self._patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, f8sub.Float8Tensor) for kind in types):
            return NotImplemented  # to its own table, from where the operators on the codes come back here
        self.scaled_matmuls += func.overloadpacket in _MATMULS
        self.matmuls += func.overloadpacket in _MATMULS
        self.plain_matmuls += func.overloadpacket in _PLAIN_MATMULS and not self._in_reference
        out = func(*args, **(kwargs or {}))
        if self._casts(func, args, out):
            self.casts.append(tuple(out.shape))
        return out

    @staticmethod
    def _casts(func, args, out) -> bool:
        """Whether ``out`` holds codes and is made of a high-precision tensor, whatever the operator is called."""
        if not isinstance(out, torch.Tensor) or out.dtype not in _CAST_TO or func.overloadpacket in _EMPTY:
            return False
        read = args[1:] if func.overloadpacket is torch.ops.aten.copy_ else args
        tensors = [arg for arg in read if isinstance(arg, torch.Tensor)]
        return any(arg.is_floating_point() and arg.dtype not in FLOAT8 for arg in tensors)
