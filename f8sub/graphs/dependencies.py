"""Dependencies: all that a captured step reads by address, or has as a constant, and whether that is as it was."""

import functools
import itertools
import operator
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from f8sub.graphs.optimizers import is_on_device
from f8sub.linear.autocast import recipes_entered
from f8sub.torch_compat import (
    hooks_of_all_modules,
    is_dtensor,
    no_torch_function_of_subclasses,
    sharding_options,
    tree_leaves,
)
from f8sub.weights.conversion import Conversion


def innermost(optimizer: Any) -> Any:
    """Return the optimizer that has the states: ``MasterWeights`` and accelerate's have another one within."""
    while isinstance(within := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = within
    return optimizer


class _Addresses:
    """Compares tensors that a graph reads by address.

    As all that is looked at before each replay of a large model, thousands of objects, by loops that run in C.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._sharded: list[Any] = [tensor for tensor in tensors if is_dtensor(tensor)]
        self._whole = [tensor for tensor in tensors if not is_dtensor(tensor)]
        # Addresses alone: values are the graph's to change, and a loaded state dict brings other memory.
        self._addresses = self._addresses_now()

    def difference(self, now: Sequence[Any]) -> str | None:
        """Say what was replaced or moved; None where nothing was. ``now`` has those of today."""
        if len(now) != len(self._tensors):
            return f"{len(now)} tensors, {len(self._tensors)} before"
        if not all(map(operator.is_, now, self._tensors)):
            return f"{self._first(map(operator.is_not, now, self._tensors))} was replaced"
        if self._addresses != self._addresses_now():
            return "a tensor was moved to other memory"
        return None

    def _addresses_now(self) -> list[int]:
        local = [tensor._local_tensor for tensor in self._sharded]
        return [*map(torch.Tensor.data_ptr, local), *map(torch.Tensor.data_ptr, self._whole)]

    def _first(self, different: Iterable[bool]) -> str:
        return f"a tensor of shape {tuple(next(itertools.compress(self._tensors, different)).shape)}"


class _Parameters(_Addresses):
    """Compares a model's parameters and buffers: which ones learn, and their hooks, as well."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__(tensors)
        self._learns = list(map(_learns, tensors))
        self._hooks = [_keys(map(hooks, tensors)) for hooks in _HOOKS_OF_TENSOR]

    @override
    def difference(self, now: Sequence[Any]) -> str | None:
        if (found := super().difference(now)) is not None:
            return found
        if self._learns != (learns := list(map(_learns, now))):
            return f"{self._first(map(operator.ne, learns, self._learns))} was frozen or unfrozen"
        for hooks, before in zip(_HOOKS_OF_TENSOR, self._hooks, strict=True):
            tables = list(map(hooks, now))
            # The usual case: no tensor has any.
            if (any(tables) or any(before)) and before != (keys := _keys(tables)):
                return f"{self._first(map(operator.ne, keys, before))} has other hooks"
        return None


class _States(_Addresses):
    """Compares the tensors among an optimizer's states."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        super().__init__([value for value in self._values() if isinstance(value, torch.Tensor)])

    def changed(self) -> str | None:
        """Say what was replaced or moved; None where nothing was."""
        now = self._values()
        if len(now) != len(self._tensors):
            # Numbers among them are an optimizer's own affair.
            now = [value for value in now if isinstance(value, torch.Tensor)]
        return self.difference(now)

    def _values(self) -> list[Any]:
        states = () if self._optimizer is None else innermost(self._optimizer).state.values()
        return list(itertools.chain.from_iterable([state.values() for state in states]))


_learns = operator.attrgetter("requires_grad")
_trains = operator.attrgetter("training")
_HOOKS_OF_TENSOR = tuple(map(operator.attrgetter, ("_backward_hooks", "_post_accumulate_grad_hooks")))
_hooks_of_module = operator.attrgetter(
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
)


def _tables_of(module: torch.nn.Module) -> list[dict[str, Any]]:
    # A scripted module's are of another class, and what they give is another object at each look.
    tables = module._modules, module._parameters, module._buffers
    return [table for table in tables if isinstance(table, dict)]


def _keys(tables: Iterable[dict[int, Any] | None]) -> list[tuple[int, ...]]:
    """The keys of each table of hooks, no two of which ever have the same."""
    return [tuple(table) if table else () for table in tables]


class _Modules:
    """Compares what modules consist of and call; their tensors are compared elsewhere.

    As of ``_Addresses``, by loops that run in C, and none of them over tables that are empty.
    """

    def __init__(self, parts: Iterable[torch.nn.Module]) -> None:
        named = [each for part in parts for each in part.named_modules()]
        self._names = [name for name, _ in named]
        self.modules = [module for _, module in named]
        # Whether a table is no longer empty costs next to nothing.
        hooks = list(itertools.chain.from_iterable(map(_hooks_of_module, self.modules)))
        self._without_hooks: list[dict[int, Any]] = [table for table in hooks if not table]
        self._with_hooks: list[dict[int, Any]] = [table for table in hooks if table]
        self._hooks = self._hooks_now()
        holders = [(name, table) for name, module in named for table in _tables_of(module)]
        self._filled = _transposed(each for each in holders if each[1])
        self._empty = _transposed(each for each in holders if not each[1])
        children = (module._modules for module in self.modules)
        self._children = [table for table in children if isinstance(table, dict) and table]
        self._below = list(self._children_now())
        # Each of another class than those that are not converted, which is compared.
        converted = [(name, vars(module)) for name, module in named if "_f8sub" in vars(module)]
        self._converted = _transposed(converted)
        # What is known of modules, and what to say where it is no longer so.
        self._known: list[tuple[Callable[[], list[Any]], list[str], str, list[Any]]] = [
            (known, names, said, known())
            for known, names, said in (
                (self._kinds, self._names, "was given another class, as conversions do"),
                (self._states, self._converted[0], "was converted again"),
                (self._lengths, self._filled[0], _MORE_OR_FEWER),
            )
        ]
        self._training = list(map(_trains, self.modules))

    def difference(self) -> str | None:
        """Say what is no longer as it was; None where all is."""
        if self._training != list(map(_trains, self.modules)):
            return "model.train() or model.eval() was called"
        for known, names, said, before in self._known:
            if (now := known()) != before:
                return _said(names, map(operator.ne, now, before), said)
        names, tables = self._empty
        if any(tables):
            return _said(names, tables, _MORE_OR_FEWER)
        if not all(map(operator.is_, self._children_now(), self._below)):
            return "a module was replaced"
        if any(self._without_hooks) or self._hooks_now() != self._hooks:
            return "hooks of modules were registered or removed"
        return None

    def tensors(self) -> list[tuple[dict[str, Any], str, torch.Tensor | None]]:
        """Return each place of a parameter or buffer, with what is there; None is, where a layer has no bias."""
        places = [(table, *entry) for table in self._filled[1] for entry in table.items()]
        return [place for place in places if not isinstance(place[2], torch.nn.Module)]

    def _kinds(self) -> list[Any]:
        return list(map(type, self.modules))

    def _lengths(self) -> list[Any]:
        return list(map(len, self._filled[1]))

    def _states(self) -> list[Any]:
        return list(map(dict.get, self._converted[1], itertools.repeat("_f8sub")))

    def _children_now(self) -> Iterable[Any]:
        return itertools.chain.from_iterable(map(dict.values, self._children))

    def _hooks_now(self) -> list[int]:
        # No two tables ever have the same key.
        return list(itertools.chain.from_iterable(self._with_hooks))


_MORE_OR_FEWER = "has more or fewer modules, parameters or buffers"


def _said(names: Iterable[str], different: Iterable[Any], said: str) -> str:
    return f"{next(itertools.compress(names, different)) or 'the model'} {said}"


_NUMBERS = bool, int, float, complex, str
_FUNCTIONS = types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial
_PACKAGE = __name__.partition(".")[0]
_NOT_COMPARED = {"require_forward_param_sync", "_fsdp_use_orig_params", "_is_fsdp_managed_module"}
"""What each forward of DistributedDataParallel writes, an evaluation another value than a training step; and marks of
``fully_shard``, which replaces parameters at the same time."""


class Number(NamedTuple):
    """Holds a number, text, flag or function that Python may read or call while it launches a step.

    Attributes:
        name: the module's and the attribute's.
        attributes: of the module.
        key: the attribute.
        value: what it was.
    """

    name: str
    attributes: dict[str, Any]
    key: str
    value: Any


def numbers_of(parts: Iterable[torch.nn.Module]) -> list[Number]:
    """Return the numbers, texts, flags and functions among the attributes of modules.

    Not those that count for f8sub. A module's forward is None where it is that of the module's class.
    """
    modules = {id(module): (name, module) for part in parts for name, module in part.named_modules()}
    return [
        Number(f"{name}.{key}".lstrip("."), vars(module), key, value)
        for name, module in modules.values()
        if "_f8sub" in vars(module) or type(module).__module__.partition(".")[0] != _PACKAGE
        for key, value in ({"forward": None} | vars(module)).items()
        if (type(value) in _NUMBERS + _FUNCTIONS or key == "forward") and key not in _NOT_COMPARED
    ]


class Numbers:
    """Compares numbers of modules that a graph has as constants, such as a dropout's ``p``.

    Args:
        parts: the model's.
        changing: names of those that each step changes, which are the graph's as they are.
    """

    def __init__(self, parts: Iterable[torch.nn.Module], changing: Collection[str] = ()) -> None:
        self._numbers = [number for number in numbers_of(parts) if number.name not in changing]
        self._attributes = [number.attributes for number in self._numbers]
        self._keys = [number.key for number in self._numbers]
        self._before = [number.value for number in self._numbers]

    def changed(self) -> dict[str, tuple[Any, Any]]:
        """Return those that are no longer what they were by name, with what they were and are."""
        now = map(dict.get, self._attributes, self._keys)
        # The usual case: nobody wrote to any.
        if all(map(operator.is_, now, self._before)):
            return {}
        now = map(dict.get, self._attributes, self._keys)
        return {
            number.name: (number.value, value)
            for number, value in zip(self._numbers, now, strict=True)
            # Types first: the host would wait for a tensor that is compared.
            if type(value) is not type(number.value) or value != number.value
        }


class Dependencies:
    """Records what a captured step depends on, and compares it before each replay.

    Args:
        parts: the model's.
        conversions: of their layers.
        optimizer: whose step is captured, if one is.
        changing: see ``Numbers``.
    """

    def __init__(
        self,
        parts: Sequence[torch.nn.Module],
        conversions: Iterable[Conversion],
        optimizer: torch.optim.Optimizer | None,
        changing: Collection[str] = (),
    ) -> None:
        self._modules = _Modules(parts)
        self._numbers = Numbers(parts, changing)
        entries = self._modules.tensors()
        self._places = _transposed((holder, name) for holder, name, tensor in entries if tensor is not None)
        self._empty = _transposed((holder, name) for holder, name, tensor in entries if tensor is None)
        self._held = _Parameters([tensor for *_, tensor in entries if tensor is not None])
        self._option_names, self._options = sharding_options(self._modules.modules)
        self._sharding = self._options()
        self._tables = [(e, e.table) for c in conversions for e in c.exchanges.values()]
        self._optimizer = optimizer
        self._contexts, self._hooks_of_all = _contexts(), hooks_of_all_modules()
        self._groups = self._groups_now()
        self._hooks = self._hooks_now()
        self._states = _States(optimizer)

    def difference(self) -> str | None:
        """Say what is no longer as it was; None where all is."""
        # Attributes of a weight or a DTensor are those of any tensor, at half the time.
        with no_torch_function_of_subclasses():
            return self._changed()

    def _changed(self) -> str | None:
        # What changes most often comes first, and what costs most to compare last.
        if self._contexts != _contexts():
            return "another torch.autocast, f8sub.autocast, grad mode, matmul precision or deterministic mode is on"
        if self._hooks_of_all != hooks_of_all_modules():
            return "hooks of all modules were registered or removed"
        if (found := self._modules.difference()) is not None:
            return found
        if changed := self._numbers.changed():
            return f"{next(iter(changed))} changed"
        now = list(map(dict.get, *self._places))
        if (found := self._held.difference(now)) is not None:
            return f"of the model {found}"
        if any(map(operator.is_not, map(dict.get, *self._empty), itertools.repeat(None))):
            return "a parameter or buffer that was None is a tensor"
        if self._sharding != (sharding := self._options()):
            before, after = map(self._named_options, (self._sharding, sharding))
            return f"an option of FSDP2 changed: {_first_difference(before, after).lstrip('_')}"
        # A new table has its scales in other memory.
        if any(exchange.table is not table for exchange, table in self._tables):
            return "more layers were converted or sharded"
        if self._groups != (groups := self._groups_now()):
            return f"the optimizer's options changed: {_first_difference(self._groups, groups)}"
        if self._hooks != self._hooks_now():
            return "the optimizer has other hooks"
        if (found := self._states.changed()) is not None:
            return f"the optimizer's state was loaded, moved or replaced: {found}"
        return None

    def _named_options(self, groups: Iterable[tuple[Any, ...]]) -> list[dict[str, Any]]:
        return [dict(zip(self._option_names, group, strict=True)) for group in groups]

    def _groups_now(self) -> list[dict[str, Any]]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return [
            {
                name: list(map(id, value)) if name == "params" else _comparable(value)
                for name, value in group.items()
                # The graph reads other rates from the device, see ``optimizers.Rates``.
                if name != "capturable" and (name != "lr" or is_on_device(value))
            }
            for group in groups
        ]

    def _hooks_now(self) -> list[tuple[Any, ...]]:
        # What is handed to graph_step is stepped, and that steps what is within.
        names = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
        stepped = self._optimizer, innermost(self._optimizer)
        return _keys(getattr(optimizer, name, None) for optimizer in stepped for name in names)


def _transposed(pairs: Iterable[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    found = list(pairs)
    return [first for first, _ in found], [second for _, second in found]


def _comparable(value: Any) -> Any:
    """Return a group's option for comparison: parameters and tensors count by identity."""
    leaves = tree_leaves(value)
    return [id(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _first_difference(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> str:
    if len(before) != len(now):
        return f"{len(now)} groups, {len(before)} before"
    for index, (old, new) in enumerate(zip(before, now, strict=True)):
        for name in {**old, **new}:
            if old.get(name) != new.get(name):
                return f"{name} of group {index}"
    return "a group"


def _contexts() -> tuple[Any, ...]:
    return (
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        recipes_entered(),
    )
