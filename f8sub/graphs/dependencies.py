"""Dependencies: what a captured step reads by address, or has as a constant, and whether that is as it was."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from f8sub.linear.autocast import recipes_entered
from f8sub.torch_compat import tree_leaves
from f8sub.weights.conversion import Conversion
from f8sub.weights.weight import local_tensor


def innermost(optimizer: Any) -> Any:
    """The optimizer that has the states: ``MasterWeights`` and accelerate's have another one within."""
    while isinstance(within := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = within
    return optimizer


class Dependencies:
    """As they are when a step is captured. To compare takes some microseconds for each ten tensors.

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
        self._training = [module.training for module in self._modules]
        self._parameters = list(_entries(self._modules, "_parameters"))
        self._buffers = list(_entries(self._modules, "_buffers"))
        self._tables = [(e, e.table) for c in conversions for e in c.exchanges.values()]
        self._optimizer = optimizer
        self._contexts = _contexts()
        self._groups, self._states = self._of_groups(), self._of_states()

    def difference(self) -> str | None:
        """What is no longer as it was; None where all is."""
        if self._contexts != _contexts():
            return "another torch.autocast, f8sub.autocast or grad mode is entered"
        if self._training != [module.training for module in self._modules]:
            return "model.train() or model.eval() was called"
        for entries, kind in ((self._parameters, "parameter"), (self._buffers, "buffer")):
            for holder, name, tensor, address, learns in entries:
                if (found := holder.get(name)) is not tensor or local_tensor(tensor).data_ptr() != address:
                    was = "moved" if found is tensor else "replaced"
                    return f"{kind} {name} of shape {tuple(tensor.shape)} was {was}"
                if tensor.requires_grad is not learns:
                    return f"{kind} {name} of shape {tuple(tensor.shape)} was frozen or unfrozen"
        if any(exchange.table is not table for exchange, table in self._tables):
            return "more layers were converted or sharded"
        if self._groups != (now := self._of_groups()):
            return f"the optimizer's options changed: {_first_difference(self._groups, now)}"
        if self._states != self._of_states():
            return "the optimizer's state was loaded, moved or replaced"
        return None

    def _of_groups(self) -> list[dict[str, Any]]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return [
            {name: _comparable(value) for name, value in group.items() if name not in ("lr", "capturable")}
            for group in groups
        ]

    def _of_states(self) -> list[int]:
        if self._optimizer is None:
            return []
        states = innermost(self._optimizer).state.values()
        tensors = (value for state in states for value in state.values() if isinstance(value, torch.Tensor))
        return [local_tensor(tensor).data_ptr() for tensor in tensors]


_Entry = tuple[dict[str, Any], str, torch.Tensor, int, bool]


def _entries(modules: Iterable[torch.nn.Module], kind: str) -> Iterator[_Entry]:
    """(where it is held, name, tensor, address, whether it learns) of parameters or buffers."""
    for module in modules:
        holder = getattr(module, kind)
        for name, tensor in holder.items():
            if tensor is not None:
                yield holder, name, tensor, local_tensor(tensor).data_ptr(), tensor.requires_grad


def _comparable(value: Any) -> Any:
    """A group's option: parameters and tensors count by identity."""
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
