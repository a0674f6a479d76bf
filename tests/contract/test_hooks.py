"""Who looks on by hooks of a tensor or a node lets the tensor go: no collector sees a cycle through one."""

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

import f8sub
from tests.data_sets import gaussian, generator


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(gaussian((3, 32, 32), generator(1)))
        self.results: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = f8sub.grouped_linear(x, self.up, torch.tensor([2, 2, len(x)]))
        self.results.append(weakref.ref(y))
        return y


f8sub.register_experts(Experts)


LOOKERS: dict[str, Callable[[nn.Module], AbstractContextManager[object]]] = {
    "Monitor": lambda model: f8sub.Monitor(model, every=1, roles=("x", "w", "y", "dy", "dx", "dw")),
    "find_nonfinite": f8sub.find_nonfinite,
}


def step(model: nn.Module) -> None:
    y = model(gaussian((8, 32), generator(3)))
    y.backward(gaussian((8, 32), generator(4)))


@pytest.mark.parametrize("name", [*LOOKERS, "sensitivity"])
def test_results_are_freed(name):
    experts = Experts()
    model = nn.Sequential(nn.Linear(32, 32), experts, nn.Linear(32, 32))
    model = f8sub.convert_to_float8(model, "rowwise", experts=True, skip_defaults=False)
    dense: list[weakref.ref[torch.Tensor]] = []
    for layer in (model[0], model[2]):
        layer.register_forward_hook(lambda module, args, y: dense.append(weakref.ref(y)))
    if name == "sensitivity":
        f8sub.sensitivity(model, lambda model: model(gaussian((8, 32), generator(3))).square().mean())
    else:
        with LOOKERS[name](model):
            step(model)
    gc.collect()
    results = [*experts.results, *dense]
    assert len(results) == 3
    assert [each() for each in results] == [None] * 3
