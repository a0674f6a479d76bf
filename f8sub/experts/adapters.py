"""Adapted: a weight of experts and PEFT's adapters over it, kept apart.

PEFT's ``target_parameters`` make a weight ``W + scaling * lhs @ rhs`` while a forward runs, by parametrizations.
Cast to codes, such a sum would lose what an adapter adds to it: less than half a step of e4m3 is rounded away.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from f8sub.kernels.grouped.gemm import in_high_precision
from f8sub.kernels.grouped.operands import Groups

MULTIPLE_OF_RANK = 8
"""What torch's grouped product on a GPU wants of every dimension in bfloat16: rows of 16 bytes."""


class Added(NamedTuple):
    """What one adapter adds to a weight as it is stored: ``scaling * lhs @ rhs``, or ``lhs`` where ``rhs`` is None.

    Attributes:
        lhs: (E, rows, rank), or (E, rows, cols).
        rhs: (E, rank, cols).
        scaling: of the product.
    """

    lhs: torch.Tensor
    rhs: torch.Tensor | None
    scaling: float

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Added":
        """Both factors changed."""
        return Added(change(self.lhs), None if self.rhs is None else change(self.rhs), self.scaling)

    def transposed(self) -> "Added":
        """What it adds to the weight with its last two dimensions swapped."""
        lhs, rhs, scaling = self
        if rhs is None:
            return Added(lhs.transpose(1, 2), None, scaling)
        return Added(rhs.transpose(1, 2), lhs.transpose(1, 2), scaling)

    def whole(self) -> torch.Tensor:
        """The sum's part, in the shape of the weight."""
        return self.lhs if self.rhs is None else self.scaling * (self.lhs @ self.rhs)

    def of_tokens(self, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        """What it adds to y, (M, rows): x, (M, cols), times each expert's part of it."""
        lhs, rhs, scaling = self.each(lambda factor: factor.to(x.dtype))
        if rhs is None:
            return in_high_precision(x, lhs, groups)
        missing = -rhs.shape[1] % MULTIPLE_OF_RANK
        lhs = torch.nn.functional.pad(lhs, (0, missing))
        rhs = torch.nn.functional.pad(rhs, (0, 0, 0, missing))
        return in_high_precision(in_high_precision(x, rhs, groups) * scaling, lhs.contiguous(), groups)


class Adapted(torch.Tensor):
    """The sum of a weight and what adapters add. ``grouped_linear`` never makes it; all other code reads it."""

    source: torch.Tensor
    added: tuple[Added, ...]

    @staticmethod
    def __new__(cls: type["Adapted"], source: torch.Tensor, added: tuple[Added, ...]) -> "Adapted":
        """Of ``source``, the weight as it is stored."""
        self: Adapted = torch.Tensor._make_wrapper_subclass(
            cls, source.shape, dtype=source.dtype, device=source.device
        )
        self.source, self.added = source, added
        return self

    def of_tokens(self, x: torch.Tensor, groups: Groups, *, transposed: bool) -> torch.Tensor:
        """What the adapters add to y.

        Args:
            x: (M, K), in the dtype of y.
            groups: of its rows.
            transposed: whether the weight is (E, K, N).
        """
        dtype, x = x.dtype, x.bfloat16() if x.is_cuda else x
        added = [each.transposed() if transposed else each for each in self.added]
        return torch.stack([each.of_tokens(x, groups) for each in added]).sum(0).to(dtype)

    def whole(self) -> torch.Tensor:
        """The sum, as a plain tensor."""
        found = self.source
        for each in self.added:
            found = found + each.whole().to(found.dtype)
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        adapted = next((each for each in args if isinstance(each, Adapted)), None)
        name = getattr(func, "__name__", "")
        if adapted is not None and func is torch.Tensor.bfloat16:
            return Adapted(
                adapted.source.bfloat16(), tuple(each.each(torch.Tensor.bfloat16) for each in adapted.added)
            )
        is_transpose = func is torch.Tensor.transpose and not kwargs
        if adapted is not None and is_transpose and sorted(dim % 3 for dim in args[1:]) == [1, 2]:
            turned = tuple(each.transposed() for each in adapted.added)
            return Adapted(adapted.source.transpose(1, 2), turned)
        if name == "__get__" or name in _OF_SHAPES:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        plain = [each.whole() if isinstance(each, Adapted) else each for each in args]
        return func(*plain, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        plain = [each.whole() if isinstance(each, Adapted) else each for each in args]
        return func(*plain, **(kwargs or {}))


_OF_SHAPES = {"dim", "size", "stride", "numel", "is_contiguous", "is_floating_point", "__len__"}


class _Apart(torch.nn.Module):
    """The parametrization that stands for one of PEFT's while a module of experts runs."""

    def __init__(self, added: Added) -> None:
        super().__init__()
        self.added = added

    def forward(self, weight: torch.Tensor) -> Adapted:
        if isinstance(weight, Adapted):
            return Adapted(weight.source, (*weight.added, self.added))
        return Adapted(weight, (self.added,))


def _added_by(proxy: Any) -> Added | None:
    """What one of PEFT's parametrizations adds; None for any other. Source: peft 0.21, ``tuners/lora/layer.py``."""
    kind = type(proxy).__name__
    if kind == "_LoraFactorsProxy":
        return Added(proxy.lhs, proxy.rhs, proxy.scaling)
    return Added(proxy.delta_weight, None, 1.0) if kind == "_LoraParameterProxy" else None


@contextlib.contextmanager
def adapters_apart(module: torch.nn.Module) -> Iterator[None]:
    """Parametrizations of PEFT give ``Adapted`` weights within it; those of others what they always do."""
    lists: Any = module._modules.get("parametrizations")
    replaced = []
    for parametrizations in () if lists is None else lists.values():
        for index, proxy in enumerate(parametrizations):
            if (added := _added_by(proxy)) is not None:
                parametrizations[index] = _Apart(added)
                replaced.append((parametrizations, index, proxy))
    try:
        yield
    finally:
        for parametrizations, index, proxy in replaced:
            parametrizations[index] = proxy


def own_parameter(module: torch.nn.Module, name: str) -> torch.Tensor:
    """A module's parameter, whatever parametrizations make of it; what they, or pruning, made of several tensors."""
    if (parameter := module._parameters.get(name)) is not None:
        return parameter
    lists: Any = module._modules.get("parametrizations")
    original = getattr(lists[name], "original", None) if lists is not None and name in lists else None
    found: torch.Tensor = getattr(module, name) if original is None else original
    return found
