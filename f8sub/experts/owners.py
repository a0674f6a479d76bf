"""Which converted module a weight is of, where no forward of the module runs.

Activation checkpointing repeats in backward what a module's forward handed to it, outside of that forward. Code may
also multiply by a module's weights without calling the module. The weight tells its module then: it is the module's
parameter, a view of one, or over the same memory. A weight that was copied before, as ``2 * weight`` is, is known by
its shape and dtype, where the modules that multiplied by such copies have one plan. So is every weight while
``torch.compile`` traces a function alone, where no weight can be asked for its module.
"""

import weakref
from typing import Any, NamedTuple

import torch

from f8sub.errors import Float8ConfigError
from f8sub.experts.adapters import own_parameter
from f8sub.experts.transposed import Transposed
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import constant_result, graph_task, saved_tensors_hook
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.weight import Weight, local_tensor

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
    for name in module.weights:
        if is_of(weight, own_parameter(module, name)):
            return str(name)
    return None


def is_of(weight: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a weight is a parameter, a view of it, or over the same memory: reentrant checkpoints detach weights."""
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
            raise Float8ConfigError(found)
        return found
    for module in _modules:
        if any(
            weight is (own := own_parameter(module, name)) or weight._base is own for name in module.weights
        ):
            return module
    if graph_task() == -1:
        return None
    for module in _modules:
        if name_in(module, weight) is not None:
            return module
    return _owner_of_copy(weight)


class _StandIn(NamedTuple):
    """What compiled code knows of the module of a weight, which it cannot ask for it."""

    plan: Any
    fqn: str
    weights: tuple[str, ...] = ()


class _StandIns:
    """Stand-ins, or why there is none, each an attribute: dynamo guards on the one that it reads."""


_stand_ins = _StandIns()


@constant_result
def _named_like(*shape: int) -> str:
    """The attribute of ``_stand_ins`` for weights of a shape."""
    found = [
        module
        for module in _modules
        if any(sorted(own_parameter(module, name).shape[1:]) == sorted(shape[1:]) for name in module.weights)
    ]
    fqns = ", ".join(sorted({module.fqn for module in found}))
    plans = {module.plan for module in found}
    name = f"{fqns} by {sorted(plan.key for plan in plans)} of {shape}"
    if not hasattr(_stand_ins, name):
        why_not = (
            f"{fqns}: torch.compile traces a product with a weight of {shape} where no forward of a converted module "
            "runs, and modules of several recipes have such weights. Compile the module, or the checkpointed function "
            "together with it"
        )
        setattr(_stand_ins, name, _StandIn(plans.pop(), fqns) if len(plans) == 1 else why_not)
    return name


def _owner_of_copy(weight: torch.Tensor) -> Any:
    owners = list(_copied.get((weight.shape, weight.dtype), ()))
    if len({module.plan for module in owners}) > 1:
        raise Float8ConfigError(
            f"{', '.join(sorted(module.fqn for module in owners))}: activation checkpointing repeats a product in "
            f"backward whose weight is a copy of {tuple(weight.shape)}, and modules of several recipes multiply by "
            "copies like it. Give f8sub.grouped_linear the parameter itself, or checkpoint the whole module"
        )
    return owners[0] if owners else None


def note(module: torch.nn.Module, weight: torch.Tensor) -> None:
    """Remember a product of a module's forward whose weight is a copy, where activation checkpointing may repeat it."""
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and saved_tensors_hook() is None):
        return
    _copied.setdefault((weight.shape, weight.dtype), weakref.WeakSet()).add(module)


def _memory(local: torch.Tensor) -> tuple[int, int] | None:
    """Where a weight's elements or codes begin, and how many there are; None where that is not known of it."""
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
