"""Errors of reduced gradients, which another feature measures, as rows of a monitor."""

import weakref

import torch

from f8sub.diagnostics.statistics import GRADIENT, Statistics, decibels
from f8sub.gradients.reduction import measured_by_module
from f8sub.host_copy import HostCopy


class GradientRows:
    """What was measured of a model's gradients and not told yet."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._told = model, weakref.WeakKeyDictionary[object, torch.Tensor]()
        self._modules: dict[str, torch.nn.Module] = {}
        self._known = 0

    def new(self) -> "tuple[list[str], HostCopy] | None":
        """Names of modules, and squares on their way to the host; None where there are none, which costs a look."""
        if self._known != len(measured_by_module):
            self._known = len(measured_by_module)
            modules = self._model.named_modules()
            self._modules = {name: module for name, module in modules if module in measured_by_module}
        names, found = [], []
        for name, module in self._modules.items():
            squares = measured_by_module[module]() if module in measured_by_module else None
            if squares is not None and squares is not self._told.get(module):
                self._told[module] = squares
                names.append(name.replace("_orig_mod.", "") or "(root)")
                found.append(squares)
        return (names, HostCopy(torch.stack(found))) if found else None


def rows_of(step: int, names: list[str], squares: torch.Tensor) -> list[Statistics]:
    """Of squares, (modules, 2), on the host."""
    numbers = [name for name in Statistics._fields if name not in ("step", "layer", "role", "format")]
    rows = []
    for name, (signal, error) in zip(names, squares.tolist(), strict=True):
        of_row = {**dict.fromkeys(numbers, float("nan")), "sqnr": decibels(signal, error)}
        rows.append(Statistics(step, name, GRADIENT, "e4m3 1x128", **of_row))
    return rows
