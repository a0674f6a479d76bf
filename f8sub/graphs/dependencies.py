"""Dependencies: all that a captured step reads by address, or has as a constant, and whether that is as it was."""

import operator
from collections.abc import Iterable
from typing import Any

import torch

from f8sub.graphs.optimizers import is_on_device
from f8sub.linear.autocast import recipes_entered
from f8sub.torch_compat import is_dtensor, tree_leaves
from f8sub.weights.conversion import Conversion


def innermost(optimizer: Any) -> Any:
    """Return the optimizer that has the states: ``MasterWeights`` and accelerate's have another one within."""
    while isinstance(within := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = within
    return optimizer


class _Tensors:
    """Compares tensors that a graph reads by address.

    All are compared by loops that run in C: a replay of a large model has some thousands.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._sharded: list[Any] = [tensor for tensor in tensors if is_dtensor(tensor)]
        self._whole = [tensor for tensor in tensors if not is_dtensor(tensor)]
        self._learns = list(map(_learns, tensors))
        # Addresses alone: values are the graph's to change, and a loaded state dict brings other memory.
        self._addresses = self._addresses_now()

    def difference(self, now: list[Any]) -> str | None:
        """Say what was replaced, moved, frozen or unfrozen; None where nothing was. ``now`` has those of today."""
        if len(now) != len(self._tensors):
            return f"{len(now)} tensors, {len(self._tensors)} before"
        if not all(map(operator.is_, now, self._tensors)):
            return f"{self._first(map(operator.is_, now, self._tensors))} was replaced"
        if self._addresses != self._addresses_now():
            return "a tensor was moved to other memory"
        if self._learns != (learns := list(map(_learns, now))):
            return f"{self._first(map(operator.eq, learns, self._learns))} was frozen or unfrozen"
        return None

    def _addresses_now(self) -> list[int]:
        local = [tensor._local_tensor for tensor in self._sharded]
        return [*map(torch.Tensor.data_ptr, local), *map(torch.Tensor.data_ptr, self._whole)]

    def _first(self, alike: Iterable[bool]) -> str:
        return f"a tensor of shape {tuple(self._tensors[list(alike).index(False)].shape)}"


_learns = operator.attrgetter("requires_grad")
_trains = operator.attrgetter("training")


class Dependencies:
    """Records what a captured step depends on, and compares it before each replay.

    Args:
        parts: the model's.
        conversions: of their layers.
        optimizer: whose step is captured, if one is.
    """

    def __init__(
        self,
        parts: Iterable[torch.nn.Module],
        conversions: Iterable[Conversion],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._modules = [module for part in parts for module in part.modules()]
        self._training = list(map(_trains, self._modules))
        holders = [
            holder for module in self._modules for holder in (module._parameters, module._buffers) if holder
        ]
        # Entries that are None, such as a bias that a layer has not, may stay so.
        filled = [(holder, *entry) for holder in holders for entry in holder.items() if entry[1] is not None]
        self._places = [(holder, name) for holder, name, _ in filled]
        self._held = _Tensors([tensor for *_, tensor in filled if tensor is not None])
        self._tables = [(e, e.table) for c in conversions for e in c.exchanges.values()]
        self._optimizer = optimizer
        self._contexts = _contexts()
        self._groups = self._groups_now()
        self._states = _Tensors(self._states_now())

    def difference(self) -> str | None:
        """Say what is no longer as it was; None where all is."""
        # What changes most often comes first, and what costs most to compare last.
        if self._contexts != _contexts():
            return "another torch.autocast, f8sub.autocast or grad mode is entered"
        if self._training != list(map(_trains, self._modules)):
            return "model.train() or model.eval() was called"
        now = [holder.get(name) for holder, name in self._places]
        if (found := self._held.difference(now)) is not None:
            return f"of the model {found}"
        # A new table has its scales in other memory.
        if any(exchange.table is not table for exchange, table in self._tables):
            return "more layers were converted or sharded"
        if self._groups != (groups := self._groups_now()):
            return f"the optimizer's options changed: {_first_difference(self._groups, groups)}"
        if (found := self._states.difference(self._states_now())) is not None:
            return f"the optimizer's state was loaded, moved or replaced: {found}"
        return None

    def _groups_now(self) -> list[dict[str, Any]]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return [
            {
                name: _comparable(value)
                for name, value in group.items()
                # The graph reads other rates from the device, see ``optimizers.Rates``.
                if name != "capturable" and (name != "lr" or is_on_device(value))
            }
            for group in groups
        ]

    def _states_now(self) -> list[torch.Tensor]:
        states = [] if self._optimizer is None else innermost(self._optimizer).state.values()
        return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


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
        recipes_entered(),
    )
