"""UnroundedGradient: a gradient in bfloat16 that keeps its values in float32 until something reads it.

Autograd wants the gradient of a weight in the weight's dtype, which under FSDP2 is bfloat16. FSDP2 reduces gradients in
float32. Rounded for autograd, a gradient would be written, read and written again before it is reduced. Products in
float8 make it in float32, so it stays what they made, and the reduction reads it where they wrote it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.tensor.op_schema import describe
from f8sub.torch_compat import no_torch_function, return_and_correct_aliasing, tree_map_only

aten = torch.ops.aten

_SAME = aten.detach.default, aten.alias.default, aten.clone.default


class UnroundedGradient(torch.Tensor):
    """A gradient of ``dtype`` to all that looks at it. Sums of gradients, and casts to float32, do not round it.

    Attributes:
        exact: the values, in float32.
    """

    __torch_function__ = no_torch_function

    exact: torch.Tensor

    @staticmethod
    def __new__(
        cls: type["UnroundedGradient"], exact: torch.Tensor, dtype: torch.dtype
    ) -> "UnroundedGradient":
        """Wrap values of another dtype than ``dtype``."""
        self: UnroundedGradient = torch.Tensor._make_wrapper_subclass(
            cls, exact.shape, strides=exact.stride(), dtype=dtype, device=exact.device
        )
        self.exact = exact
        return self

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["exact"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: torch.dtype, outer_size: Sequence[int], outer_stride: Any
    ) -> "UnroundedGradient":
        return UnroundedGradient(inner["exact"], context)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UnroundedGradient({tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(getattr(kind, "takes_unrounded", False) for kind in types):
            return NotImplemented  # torch asks that class next
        if func in _SAME:
            same = UnroundedGradient(func(args[0].exact, *args[1:], **kwargs), args[0].dtype)
            return return_and_correct_aliasing(func, args, kwargs, same)
        if func is aten._to_copy.default:
            made = func(args[0].exact, **kwargs)
            return UnroundedGradient(made, args[0].dtype) if kwargs.get("dtype") is None else made
        if func is aten.add.Tensor and args[0].dtype is getattr(args[1], "dtype", None):
            return UnroundedGradient(func(*map(exact, args), **kwargs), torch.result_type(*args))
        written = describe(func).written
        places = {place for each in written for place in each}
        read = exact if func is aten.add_.Tensor else _rounded
        given = [_with(exact if at in places else read, value) for at, value in enumerate(args)]
        named = {name: _with(exact if name in places else read, value) for name, value in kwargs.items()}
        found = func(*given, **named)
        # An operator that writes to a gradient returns it.
        return args[0] if written and isinstance(args[0], UnroundedGradient) else found


def exact(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient's values without a rounding that is still to come."""
    return gradient.exact if isinstance(gradient, UnroundedGradient) else gradient


def _with(values: Callable[[torch.Tensor], torch.Tensor], given: Any) -> Any:
    return tree_map_only(UnroundedGradient, values, given)


def _rounded(gradient: torch.Tensor) -> torch.Tensor:
    return exact(gradient).to(gradient.dtype)


def dtype_of_gradient(w: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a product in float8 makes the gradient of a weight; ``as_gradient`` takes it."""
    # Dynamo traces no tensor of a class that it has not seen as an input.
    if not isinstance(w, Float8Tensor) or torch.compiler.is_dynamo_compiling():
        return w.dtype
    return w.gradient_dtype or w.dtype


def as_gradient(dw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the gradient of a weight of ``dtype``, for autograd."""
    return dw if dw.dtype == dtype else UnroundedGradient(dw, dtype)
