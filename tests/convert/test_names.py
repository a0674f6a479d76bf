"""Names of a user's class: f8sub takes none but ``_f8sub``, whether they are set before or after the conversion."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import f8sub
from f8sub.experts.module import ExpertsState, Float8Experts
from f8sub.linear.converted import ConvertedModule, LayerState
from f8sub.linear.float8_linear import Float8Linear, LinearState
from tests.data_sets import gaussian, generator

FIELDS = {name for cls in (LayerState, LinearState, ExpertsState) for name in vars(cls) if name[0] != "_"}
EARLIER = "plan fqn converted float8_all_gather keep_x seam weights how follow rowwise format_of is_gathered"
NAMES = sorted(FIELDS | {*EARLIER.split(), "enter_weights", "_stored", "_held", "_take", "_become", "_run"})

EXPERTS, FEATURES, TOKENS = 4, 32, 8


class Added(nn.Module):
    """A submodule with a parameter."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((FEATURES,), value))

    def forward(self) -> torch.Tensor:
        return self.scale * 2


def parameter(holder: nn.Module, name: str, value: float) -> None:
    holder.register_parameter(name, nn.Parameter(torch.full((FEATURES,), value)))


def assigned(holder: nn.Module, name: str, value: float) -> None:
    setattr(holder, name, nn.Parameter(torch.full((FEATURES,), value)))


def buffer(holder: nn.Module, name: str, value: float) -> None:
    holder.register_buffer(name, torch.full((FEATURES,), value))


def flag(holder: nn.Module, name: str, value: float) -> None:
    setattr(holder, name, value)


def submodule(holder: nn.Module, name: str, value: float) -> None:
    setattr(holder, name, Added(value))


def method(holder: nn.Module, name: str, value: float) -> None:
    setattr(holder.own_class, name, lambda self: value)


def own_property(holder: nn.Module, name: str, value: float) -> None:
    setattr(holder.own_class, name, property(lambda self: value))


KINDS: list[Callable[[nn.Module, str, float], None]] = [
    parameter,
    assigned,
    buffer,
    flag,
    submodule,
    method,
    own_property,
]


def sum_of(holder: nn.Module, names: list[str]) -> Any:
    values = [getattr(holder, name) for name in names]
    return sum(value() if callable(value) else value for value in values)


def linear() -> nn.Module:
    """A model of a layer whose class is the user's, and that reads the layer's attributes."""

    class Projection(nn.Linear):
        own_class: Any = None

    Projection.own_class = Projection

    class Model(nn.Module):
        names: tuple[str, ...] = ()

        def __init__(self) -> None:
            super().__init__()
            self.layer = Projection(FEATURES, FEATURES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + sum_of(self.layer, self.names)

    return Model()


def experts() -> nn.Module:
    """A model of experts whose forward reads its own attributes."""

    class Experts(nn.Module):
        own_class: Any = None

        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.empty(EXPERTS, FEATURES, FEATURES))

        def forward(self, x: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
            y = f8sub.grouped_linear(x, self.up, torch.tensor([2, 4, 6, TOKENS]))
            return y + sum_of(self, names)

    Experts.own_class = Experts
    f8sub.register_experts(Experts)

    class Model(nn.Module):
        names: tuple[str, ...] = ()

        def __init__(self) -> None:
            super().__init__()
            self.layer = Experts()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x, self.names)

    return Model()


def convert(model: nn.Module, recipe: str) -> None:
    f8sub.convert_to_float8(model, recipe, experts=True, skip_defaults=False)


def trained(model: nn.Module) -> tuple[torch.Tensor, ...]:
    """The outputs of two steps, and the parameters after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(2):
        y = model(gaussian((TOKENS, FEATURES), generator(2 + step)))
        y.backward(gaussian((TOKENS, FEATURES), generator(7 + step)))
        optimizer.step()
        optimizer.zero_grad()
        f8sub.precompute_scales(model)
        found.append(y.detach())
    return *found, *(value.detach().clone() for value in model.parameters())


def case(
    make: Callable[[], nn.Module],
    kind: Callable[[nn.Module, str, float], None],
    recipe: str,
    *,
    first: bool,
    prefix: str = "",
) -> nn.Module:
    """A converted model that has all names, as one kind of attribute, with a prefix."""
    model = make()
    with torch.no_grad():
        for index, value in enumerate(model.parameters()):
            value.copy_(gaussian(tuple(value.shape), generator(index)))
    if not first:
        convert(model, recipe)
    model.names = tuple(prefix + name for name in NAMES)
    for index, name in enumerate(model.names):
        kind(model.layer, name, 0.25 * index)
    if first:
        convert(model, recipe)
    assert isinstance(model.layer, ConvertedModule)
    return model


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("make", [linear, experts])
def test_names_of_a_users_class_are_its_own(make, kind, first, recipe):
    expected = trained(case(make, kind, recipe, first=first, prefix="my_"))
    model = case(make, kind, recipe, first=first)
    copied = copy.deepcopy(model)
    for found in (trained(model), trained(copied)):
        assert all(map(torch.equal, found, expected))
    # What reads a converted module from outside.
    assert recipe in repr(model)
    assert recipe in str(f8sub.conversion_report(model, tokens=TOKENS))
    assert f8sub.sensitivity(model, lambda model: model(gaussian((TOKENS, FEATURES), generator(2))).sum())
    f8sub.convert_from_float8(model)
    after = [
        model.names[-1] in vars(model.layer).get(place, {})
        for place in ("_parameters", "_buffers", "_modules")
    ]
    assert any(after) or hasattr(model.layer, model.names[-1])
    assert sum_of(model.layer, model.names) is not None


@pytest.mark.parametrize("make", [linear, experts])
def test_histories_have_another_name_where_a_class_has_theirs(make):
    place = "scaling_states" if make is linear else "up_scaling_states"
    model, other = make(), make()
    setattr(model.layer.own_class, place, 3)
    for each in (model, other):
        with torch.no_grad():
            for index, value in enumerate(each.parameters()):
                value.copy_(gaussian(tuple(value.shape), generator(index)))
        convert(each, "delayed")
    assert all(map(torch.equal, trained(model), trained(other)))
    assert getattr(model.layer, place) == 3
    histories = {name: value for name, value in model.state_dict().items() if "scaling_states" in name}
    assert histories
    assert all(name.startswith(f"layer._f8sub_{place}.") for name in histories)
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())
    assert all(map(torch.equal, trained(again), trained(model)))


@pytest.mark.parametrize("made", [Float8Linear, Float8Experts])
def test_converted_classes_have_no_plain_name(made):
    plain = nn.Linear if made is Float8Linear else nn.Module
    own = {
        name
        for cls in made.__mro__
        if cls not in plain.__mro__
        for name in (*vars(cls), *cls.__annotations__)
    }
    assert {name for name in own if name[:2] != "__" and not hasattr(plain, name)} == {"_f8sub"}


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
@pytest.mark.parametrize("make", [linear, experts])
def test_converted_back_it_has_what_it_had(make, recipe):
    model = make()
    before, names = [list(vars(each)) for each in model.modules()], [dir(each) for each in model.modules()]
    convert(model, recipe)
    model(gaussian((TOKENS, FEATURES), generator(2))).backward(gaussian((TOKENS, FEATURES), generator(3)))
    f8sub.convert_from_float8(model)
    assert [list(vars(each)) for each in model.modules()] == before
    assert [dir(each) for each in model.modules()] == names
