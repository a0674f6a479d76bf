"""Names that a converted module takes for itself: refused where it has them already, gone when it is converted back."""

from typing import Any

import pytest
import torch
from torch import nn

import f8sub
from tests.data_sets import gaussian, generator


def experts(weight: str = "up", **names: Any) -> nn.Module:
    """A module of experts, with attributes of its own; functions become methods of its class."""

    def init(self: nn.Module) -> None:
        nn.Module.__init__(self)
        setattr(self, weight, nn.Parameter(gaussian((4, 32, 32), generator(1))))

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return f8sub.grouped_linear(x, getattr(self, weight), torch.tensor([2, 4, 6, 8]))

    made = type("Experts", (nn.Module,), {"__init__": init, "forward": forward, **names})
    f8sub.register_experts(made)
    return made()


def linear(**names: Any) -> nn.Module:
    return type("Projection", (nn.Linear,), names)(32, 32)


def convert(module: nn.Module, recipe: str = "rowwise") -> nn.Module:
    return f8sub.convert_to_float8(nn.Sequential(module), recipe, experts=True, skip_defaults=False)


def method(self: nn.Module, *args: Any) -> None:
    """What a class has of its own."""


CLASHES = {
    "a parameter": (lambda: experts(weight="weights"), "weights"),
    "an attribute": (lambda: experts(how="sum"), "how"),
    "another attribute": (lambda: experts(plan=2.0), "plan"),
    "a method": (lambda: experts(follow=method), "follow"),
    "another method": (lambda: experts(rowwise=method), "rowwise"),
    "a private method": (lambda: experts(_run=method), "_run"),
    "several": (lambda: experts(fqn="", seam=1), "fqn, seam"),
    "a linear layer's attribute": (lambda: linear(plan=1), "plan"),
    "a linear layer's method": (lambda: linear(follow=method), "follow"),
}


@pytest.mark.parametrize("case", CLASHES)
def test_a_clash_is_refused_and_nothing_is_converted(case):
    make, name = CLASHES[case]
    module = make()
    kind, before = type(module), set(vars(module))
    with pytest.raises(f8sub.Float8ConfigError, match=rf"0: a {kind.__name__} has {name} already"):
        convert(module)
    assert type(module) is kind
    assert set(vars(module)) == before


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
@pytest.mark.parametrize("make", [experts, linear], ids=["experts", "linear"])
def test_converted_back_it_has_what_it_had(make, recipe):
    module = make()
    before, names = list(vars(module)), dir(module)
    model = convert(module, recipe)
    model(gaussian((8, 32), generator(2))).backward(gaussian((8, 32), generator(3)))
    f8sub.convert_from_float8(model)
    assert list(vars(module)) == before
    assert dir(module) == names
