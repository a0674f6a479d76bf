"""Weights of experts as code hands them on: with PEFT's adapters apart, transposed, or without their module.

[Note: adapters] PEFT's ``target_parameters`` make a weight ``W + scaling * lhs @ rhs`` while a forward runs, by
parametrizations. Cast to codes, such a sum would lose what an adapter adds to it: less than half a step of e4m3 is
rounded away.

[Note: transposed weights] Code that calls ``torch._grouped_mm`` transposes the weight before, outside of what a float8
product can take over.

[Note: which module a weight is of] Activation checkpointing repeats in backward what a module's forward handed to it,
outside of that forward. Code may also multiply by a module's weights without calling the module. The weight tells its
module then: it is the module's parameter, a view of one, or over the same memory. A weight that was copied before, as
``2 * weight`` is, is known by its shape and dtype, where the modules that multiplied by such copies have one plan. So
is every weight while ``torch.compile`` traces a function alone, where no weight can be asked for its module.
"""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from f8sub.errors import Float8ConfigError
from f8sub.kernels.grouped.gemm import in_high_precision
from f8sub.kernels.grouped.operands import Groups
from f8sub.tensor import aten_ops  # noqa: F401  (a matrix is transposed there)
from f8sub.tensor.float8_tensor import OPS, Float8Tensor
from f8sub.torch_compat import (
    constant_result,
    graph_task,
    is_one_graph,
    no_torch_function,
    saved_tensors_hook,
    untraced,
)
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.weight import Weight, held_parameter, local_tensor, own_parameter

MULTIPLE_OF_RANK = 8
"""torch's grouped product on a GPU takes dimensions that are multiples of this: in bfloat16, rows of 16 bytes."""


class Added(NamedTuple):
    """The part that one adapter adds to a weight as it is stored.

    It is ``scaling * lhs @ rhs``, or ``lhs`` where ``rhs`` is None.

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
        """Return what it adds to the weight with its last two dimensions swapped."""
        lhs, rhs, scaling = self
        if rhs is None:
            return Added(lhs.transpose(1, 2), None, scaling)
        return Added(rhs.transpose(1, 2), lhs.transpose(1, 2), scaling)

    def whole(self) -> torch.Tensor:
        """The sum's part, in the shape of the weight."""
        return self.lhs if self.rhs is None else self.scaling * (self.lhs @ self.rhs)

    def of_tokens(self, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Return what it adds to y, (M, rows): x, (M, cols), times each expert's part of it."""
        lhs, rhs, scaling = self.each(lambda factor: factor.to(x.dtype))
        if rhs is None:
            return in_high_precision(x, lhs, groups)
        # Zeros up to the next multiple add nothing to the product.
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
        """Make the sum over ``source``, the weight as it is stored, without computing it."""
        self: Adapted = torch.Tensor._make_wrapper_subclass(
            cls, source.shape, dtype=source.dtype, device=source.device
        )
        self.source, self.added = source, added
        return self

    def of_tokens(self, x: torch.Tensor, groups: Groups, *, transposed: bool) -> torch.Tensor:
        """Return what the adapters add to y, (M, N), in x's dtype.

        Args:
            x: (M, K), in the dtype of y.
            groups: of its rows.
            transposed: whether the weight is (E, K, N).
        """
        # torch's grouped product on a GPU takes bfloat16 alone.
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
        # A cast or a transpose before the product, as in torchtitan's experts, keeps the parts apart.
        if adapted is not None and func is torch.Tensor.bfloat16:
            return Adapted(
                adapted.source.bfloat16(), tuple(each.each(torch.Tensor.bfloat16) for each in adapted.added)
            )
        is_transpose = func is torch.Tensor.transpose and not kwargs
        if adapted is not None and is_transpose and sorted(dim % 3 for dim in args[1:]) == [1, 2]:
            turned = tuple(each.transposed() for each in adapted.added)
            return Adapted(adapted.source.transpose(1, 2), turned)
        # Properties and sizes need no values, and the sum is not to be computed for them.
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
    """Return what one of PEFT's parametrizations adds; None for any other.

    Source: peft 0.21, ``tuners/lora/layer.py``.
    """
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
            # Also after an error: other code calls the module by its own parametrizations.
            parametrizations[index] = proxy


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


# Weakly: a model that nobody uses any more can be freed.
_modules: weakref.WeakSet[Any] = weakref.WeakSet()
_copied: dict[tuple[torch.Size, torch.dtype], weakref.WeakSet[Any]] = {}


def enter(module: torch.nn.Module) -> None:
    """A module of experts was converted."""
    _modules.add(module)


def leave(module: torch.nn.Module) -> None:
    """A module is what it was again."""
    _modules.discard(module)
    for modules in _copied.values():
        modules.discard(module)


def name_in(module: Any, weight: torch.Tensor) -> str | None:
    """The name of the module's parameter that ``weight`` is, or lies in the memory of; None for any other tensor."""
    names = (name for name in module._f8sub.weights if is_of(weight, own_parameter(module, name)))
    return next(names, None)


def is_of(weight: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a weight is a parameter, a view of it, or over the same memory.

    Reentrant checkpoints detach weights: then the memory alone shows which parameter it is.
    """
    if weight is parameter or weight._base is parameter:
        return True
    if torch.compiler.is_compiling():
        return False
    memory = _memory(local_tensor(weight))
    return memory is not None and memory == _memory(local_tensor(parameter))


def owner_of(weight: torch.Tensor) -> Any:
    """The converted module that a weight is of, or was copied from for a product that is repeated; None for no module.

    Raises:
        Float8ConfigError: the weight is a copy, and modules with different recipes multiplied by copies like it.
    """
    if torch.compiler.is_compiling():
        if not isinstance(local_tensor(weight), Weight | Float8Tensor | Transposed):
            return None
        found = getattr(_stand_ins, _named_like(*weight.shape))
        if isinstance(found, str):
            _refuse(found)
        return found
    for module in _modules:
        if any(weight is parameter or weight._base is parameter for parameter in _held(module)):
            return module
    # Only backward repeats products; outside of it the weight is the caller's own tensor.
    if graph_task() == -1:
        return None
    for module in _modules:
        if any(is_of(weight, parameter) for parameter in _held(module)):
            return module
    return _owner_of_copy(weight)


def _refuse(message: str) -> None:
    """Raise a Float8ConfigError about code that is traced."""
    if torch.compiler.is_compiling() and not is_one_graph():
        # An error in traced code breaks the graph, and its pieces would run without the weight's module.
        _raise(message)
    raise Float8ConfigError(message)


@untraced
def _raise(message: str) -> None:
    raise Float8ConfigError(message)


def _held(module: Any) -> list[torch.Tensor]:
    """Return the weights of a module that another one's forward may look at.

    What a parametrization computes is another tensor each time, no Weight, and would be an operator more of that
    forward.
    """
    return [p for name in module._f8sub.weights if (p := held_parameter(module, name)) is not None]


class _Known(NamedTuple):
    """Holds what compiled code reads of a ``LayerState``."""

    plan: Any
    fqn: str
    keep_x: str
    weights: tuple[str, ...] = ()
    needed: None = None


class _StandIn:
    """A stand-in for a weight's module in compiled code, which cannot ask the weight for it."""

    def __init__(self, known: _Known) -> None:
        self._f8sub = known


class _StandIns:
    """Stand-ins, or why there is none, each an attribute: dynamo guards on the one that it reads."""


_stand_ins = _StandIns()


@constant_result
def _named_like(*shape: int) -> str:
    """The attribute of ``_stand_ins`` for weights of a shape."""
    # Sorted shapes, because the weight may be handed over transposed.
    found, plans = _told_apart(
        lambda: [
            module
            for module in _modules
            if any(sorted(parameter.shape[1:]) == sorted(shape[1:]) for parameter in _held(module))
        ]
    )
    fqns = ", ".join(sorted({module._f8sub.fqn for module in found}))
    # torch 2.13's dynamo takes a dot in an attribute's name for another attribute.
    name = f"{fqns} by {sorted(plan.key for plan in plans)} of {shape}".replace(".", "/")
    if not hasattr(_stand_ins, name):
        why_not = (
            f"{fqns}: torch.compile traces a product with a weight of {shape} where no forward of a converted module "
            "runs, and modules of several recipes have such weights. Compile the module, or the checkpointed function "
            "together with it"
        )
        stand_in = _StandIn(_Known(plans.pop(), fqns, found[0]._f8sub.keep_x)) if len(plans) == 1 else why_not
        setattr(_stand_ins, name, stand_in)
    return name


def _told_apart(find: Callable[[], list[Any]]) -> tuple[list[Any], set[Any]]:
    """Return the modules that ``find`` finds, and their plans; modules that nobody has any more do not count."""
    if len({module._f8sub.plan for module in find()}) > 1:
        # A module that is gone lives on in a cycle, such as its hooks', until the next collection.
        gc.collect()
    modules = find()
    return modules, {module._f8sub.plan for module in modules}


def _owner_of_copy(weight: torch.Tensor) -> Any:
    owners, plans = _told_apart(lambda: list(_copied.get((weight.shape, weight.dtype), ())))
    if len(plans) > 1:
        raise Float8ConfigError(
            f"{', '.join(sorted(module._f8sub.fqn for module in owners))}: activation checkpointing repeats a product "
            f"in backward whose weight is a copy of {tuple(weight.shape)}, and modules of several recipes multiply by "
            "copies like it. Give f8sub.grouped_linear the parameter itself, or checkpoint the whole module"
        )
    return owners[0] if owners else None


def note(module: torch.nn.Module, weight: torch.Tensor) -> None:
    """Remember a product of a module's forward whose weight is a copy, where activation checkpointing may repeat it."""
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and saved_tensors_hook() is None):
        return
    _copied.setdefault((weight.shape, weight.dtype), weakref.WeakSet()).add(module)


def _memory(local: torch.Tensor) -> tuple[int, int] | None:
    """Return where a weight's elements or codes begin, and how many there are; None where that is not known."""
    if isinstance(local, Transposed):
        local = local.source
    if isinstance(local, Float8Tensor):
        return None if local.rowwise is None else (local.rowwise.data.data_ptr(), local.numel())
    if isinstance(local, Weight) and not isinstance(
        local, MasterWeight
    ):  # codes alone, whose views share a record
        return None if local.record is None else (id(local.record), local.numel())
    # Freed memory, and that of no elements, is at 0.
    return (local.data_ptr(), local.numel()) if local.data_ptr() else None
