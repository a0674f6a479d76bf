"""grouped_linear: each expert's linear layer over its own tokens, differentiated."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from f8sub.errors import Float8ConfigError, Float8ShapeError
from f8sub.experts import one_by_one, owners
from f8sub.experts.adapters import Adapted, own_parameter
from f8sub.experts.grouped_matmul import Call, GroupedMatmul
from f8sub.experts.transposed import Transposed
from f8sub.formats import HIGH_PRECISION, MULTIPLE
from f8sub.kernels.grouped.gemm import GroupedPlan, in_high_precision, is_one_by_one
from f8sub.kernels.grouped.operands import Groups
from f8sub.kernels.scales import CURRENT_SOURCES, Sources
from f8sub.linear import autocast
from f8sub.linear.float8_linear import plan_of, sources_of
from f8sub.linear.shared_input import ends_of, sharing_tokens
from f8sub.recipe import Recipe, get_recipe
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import apply, autocast_dtype, change_and_restore, constant_result, is_dtensor


class Product(NamedTuple):
    """What ``grouped_linear`` multiplied, as it lies on this rank, and the result; without a recipe no ``call``."""

    x: torch.Tensor
    weight: torch.Tensor
    groups: Groups
    call: Call | None
    y: torch.Tensor


watchers: list[Callable[[Any, Product], None]] = []
"""Called after every product, with the converted module whose forward runs, or that the weight is of."""


class Forward:
    """A forward of a converted module, which has a plan, a name and weights; and whether it multiplied."""

    def __init__(self, module: Any) -> None:
        self.module, self._called = module, False

    def calls(self) -> None:
        """A product was called."""
        if torch.compiler.is_compiling():
            _multiplies(type(self.module).__name__)
        else:
            self._called = True

    @property
    def multiplied(self) -> bool:
        """Whether it called a product, or compiled code in it has one."""
        return self._called or _is_traced(type(self.module).__name__)


_traced: set[str] = set()
"""The classes whose products were ever traced; not the modules, for equal blocks share their compiled code."""


@constant_result
def _multiplies(kind: str) -> None:
    """Enter a class in ``_traced`` at once: in a checkpointed function dynamo refuses to write to what is outside."""
    _traced.add(kind)


@constant_result
def _is_traced(kind: str) -> bool:
    return kind in _traced


class _Running(threading.local):
    """The forwards that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Forward] = []


_running = _Running()


@contextlib.contextmanager
def running(module: torch.nn.Module) -> Iterator[Forward]:
    """Calls of ``grouped_linear`` without a recipe take this module's plan, and their errors its name."""
    stack, forward = _running.stack, Forward(module)
    if torch.compiler.is_compiling():
        change_and_restore(stack.append, forward)
        try:
            yield forward
        finally:
            change_and_restore(stack.pop)
        return
    stack.append(forward)
    try:
        with sharing_tokens():
            yield forward
    finally:
        stack.pop()


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    recipe: Recipe | str | None = None,
    *,
    transposed: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """``y = x @ w.t()`` for each expert's weight and its tokens, in float8 by a recipe.

    Every expert's y, dx and dw are those of a ``Float8Linear`` of it on its own tokens.

    Args:
        x: (M, K), sorted by expert.
        weight: (E, N, K), one matrix an expert, as parameter, plain tensor, or gathered in float8 by FSDP2;
            of a DTensor this rank's experts.
        offs: integers, (E,): the row after each expert's last one, as ``torch.nn.functional.grouped_mm`` takes it.
            Rows past the last are of no expert; y and dx are zero there.
        recipe: None for that of the converted module whose forward calls this or that the weight is of, or of the
            context that ``autocast`` entered for it; high precision in any other.
        transposed: whether the weight is stored as (E, K, N).
        backend: see ``GroupedPlan.make``; with a recipe only.

    Returns:
        (M, N), in x's dtype or that of ``torch.autocast``.

    Raises:
        Float8ShapeError: shapes that do not fit; on a CPU, where that costs nothing, also ends that do not ascend
            from 0 to at most M.
        Float8ConfigError: a recipe with delayed scaling, and no weight of a converted module whose forward runs.
    """
    if isinstance(weight, Adapted):
        own = grouped_linear(x, weight.source, offs, recipe, transposed=transposed, backend=backend)
        groups = Groups.of(ends_of(offs), len(x))
        return own + weight.of_tokens(x.to(own.dtype), groups, transposed=transposed)
    owner = _module_of(weight)
    module, plan = (owner, None) if recipe is None else (None, _plan_of(recipe, x.device.type, backend))
    if module is not None:
        plan = _plan_in_use(module, x, weight)
    sources = CURRENT_SOURCES
    if plan is not None and plan.recipe.scaling is not None:
        sources = _sources_of(module, owner, plan.recipe, weight)
    weight = local_part(weight)
    _check(owner, x, weight, offs, transposed)
    groups = Groups.of(ends_of(offs), len(x))
    if plan is None:
        y = in_high_precision(x, weight.transpose(1, 2) if transposed else weight, groups)
        for watch in watchers:
            watch(owner, Product(x, weight, groups, None, y))
        return y
    if isinstance(weight, Transposed) or not (weight.is_contiguous() or isinstance(weight, Float8Tensor)):
        # As it is stored, where codes of it are kept or were gathered.
        weight, transposed = _transposed_back(module, weight), not transposed
    call = Call(plan, autocast_dtype(x.device.type) or x.dtype, transposed, sources)
    y = multiply(x, weight, groups, call)
    if autocast.was_entered and module is not None:
        autocast.remember(module, plan, y)
    for watch in watchers:
        watch(owner, Product(x, weight, groups, call, y))
    return y


def multiply(x: torch.Tensor, weight: torch.Tensor, groups: Groups, call: Call) -> torch.Tensor:
    """The product of a call: that of all groups, or each expert's by itself where its recipe has no other."""
    if is_one_by_one(call.plan.recipe):
        return one_by_one.linear(x, weight, groups, call.plan.recipe, call.dtype, call.transposed)
    y: torch.Tensor = apply(GroupedMatmul, x, weight, groups.ends, call)
    return y


def _module_of(weight: torch.Tensor) -> Any:
    """The converted module whose forward runs, or that the weight is of; None for no module."""
    if not _running.stack:
        return owners.owner_of(weight)
    forward = _running.stack[-1]
    forward.calls()
    return forward.module


def _plan_in_use(module: Any, x: torch.Tensor, weight: torch.Tensor) -> GroupedPlan:
    if module.plan.device.type != (device := x.device).type:
        module.follow(device)
    plan: GroupedPlan = module.plan
    if not autocast.was_entered and torch.compiler.is_compiling():
        return plan
    name = owners.name_in(module, weight)
    if name is None:
        owners.note(module, weight)
    return plan_of(module, weight if name is None else own_parameter(module, name))  # type: ignore[no-any-return]


class _Plans:
    """The plans of recipes that calls named, each an attribute: dynamo guards on the one that it reads."""


_plans: Any = _Plans()


def _plan_of(recipe: Recipe | str, device: str, backend: str) -> GroupedPlan:
    if not isinstance(recipe, str):
        return GroupedPlan.make(recipe, torch.device(device), backend)
    plan: GroupedPlan = getattr(_plans, _named(recipe, device, backend))
    return plan


@constant_result
def _named(recipe: str, device: str, backend: str) -> str:
    """The attribute of ``_plans`` that holds the plan."""
    name = f"{recipe} on {device} by {backend}"
    if not hasattr(_plans, name):
        setattr(_plans, name, GroupedPlan.make(get_recipe(recipe), torch.device(device), backend))
    return name


def _sources_of(module: Any, owner: Any, recipe: Recipe, weight: torch.Tensor) -> Sources:
    """The sources of a product with a weight of a converted module, which holds what they are made of."""
    if module is not None and (name := owners.name_in(module, weight)) is not None:
        return sources_of(module, recipe, name)
    raise Float8ConfigError(
        f"{_name_of(owner)}: recipe {recipe.name!r} keeps a past of each weight, and this weight of "
        f"{tuple(weight.shape)} is no parameter of a converted module whose forward runs, nor a view of one; convert "
        "the module, give grouped_linear its parameter as it is, and no recipe"
    )


def _transposed_back(module: Any, weight: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling() and isinstance(weight, Transposed):
        # The parameter itself: dynamo cannot look into a subclass that the graph made.
        for name in () if module is None else module.weights:
            if weight._base is (parameter := own_parameter(module, name)):
                return parameter
    return weight.transpose(1, 2)


def local_part(weight: torch.Tensor) -> torch.Tensor:
    """This rank's part of a weight that expert parallelism shards; its gradient is that part's."""
    return weight.to_local(grad_placements=weight.placements) if is_dtensor(weight) else weight


def _name_of(owner: Any) -> str:
    """The module's name, for errors alone: torch 2.11 compiles once more for each name that traced code reads."""
    return "grouped_linear" if owner is None else str(owner.fqn)


def _check(owner: Any, x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, transposed: bool) -> None:
    if x.dtype not in HIGH_PRECISION:
        raise TypeError(
            f"{_name_of(owner)}: experts take tokens of {', '.join(map(str, HIGH_PRECISION))}, got {x.dtype} of shape "
            f"{tuple(x.shape)}; convert them with .to(torch.bfloat16)"
        )
    dtype = getattr(offs, "dtype", type(offs).__name__)
    if dtype not in (torch.int32, torch.int64):
        raise Float8ShapeError(
            f"{_name_of(owner)}: ends of groups are a tensor of integers, got {dtype}; pass counts.cumsum(0)"
        )
    depth = weight.shape[1 if transposed else 2] if weight.dim() == 3 else None
    if x.dim() != 2 or depth != x.shape[-1] or offs.shape != weight.shape[:1]:
        raise Float8ShapeError(
            f"{_name_of(owner)}: a grouped linear layer takes x (M, K), a weight of "
            f"{'(E, K, N)' if transposed else '(E, N, K)'} and E ends, got {tuple(x.shape)}, {tuple(weight.shape)} and "
            f"{tuple(offs.shape)}; look at what dispatches the tokens"
        )
    if offs.is_cpu and offs.numel() and type(offs) is torch.Tensor and not torch.compiler.is_compiling():
        ends = offs.tolist()
        if ends[0] < 0 or ends != sorted(ends) or ends[-1] > len(x):
            raise Float8ShapeError(
                f"{_name_of(owner)}: ends of groups ascend from 0 to at most the {len(x)} rows of x, got {ends}; "
                "tokens are sorted by expert, and their counts add up to no more than the rows"
            )
    if x.is_cuda and any(size % MULTIPLE for size in weight.shape[1:]):
        raise Float8ShapeError(
            f"{_name_of(owner)}: the dimensions of grouped products on a GPU are multiples of {MULTIPLE}, got a "
            f"weight of {tuple(weight.shape)}"
        )
