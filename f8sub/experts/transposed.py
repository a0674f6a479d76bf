"""Transposed: a weight that FSDP2 gathered in float8, seen with its last two dimensions swapped.

Code that calls ``torch._grouped_mm`` transposes the weight before, outside of what a float8 product can take over.
"""

from typing import Any

import torch

from f8sub.tensor import aten_ops  # noqa: F401  (a matrix is transposed there)
from f8sub.tensor.float8_tensor import OPS, Float8Tensor
from f8sub.torch_compat import no_torch_function

aten = torch.ops.aten


class Transposed(torch.Tensor):
    """(E, K, N) of a Float8Tensor of (E, N, K), whose codes stay where they are; for grouped products alone."""

    __torch_function__ = no_torch_function

    source: Float8Tensor

    @staticmethod
    def __new__(cls: type["Transposed"], source: Float8Tensor) -> "Transposed":
        """``source.transpose(-2, -1)``."""
        shape = (source.shape[0], source.shape[2], source.shape[1])
        self: Transposed = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=source.dtype, device=source.device
        )
        self.source = source
        return self

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["source"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], meta: None, outer_size: Any, outer_stride: Any
    ) -> "Transposed":
        return Transposed(inner["source"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            return Transposed(args[0].source)
        if func is aten.transpose.int:
            # Another tensor over the same codes, which autograd takes for a view of this one.
            return aten.alias.default(args[0].source)
        plain = [a.source.dequantize().transpose(1, 2) if isinstance(a, Transposed) else a for a in args]
        return func(*plain, **(kwargs or {}))


_of_a_matrix = OPS[aten.transpose.int]


def _transpose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``tensor.transpose(-2, -1)`` of a weight of three dimensions; a matrix as before."""
    tensor, *dims = args
    if tensor.dim() != 3 or sorted(dim % 3 for dim in dims) != [1, 2]:
        return _of_a_matrix(func, args, kwargs)
    return Transposed(tensor)


OPS[aten.transpose.int] = _transpose
