"""Another library before f8sub, or after it: what it quantized is not converted, what it replaced is told."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import f8sub
from f8sub.convert.selection import why_not_weight
from tests.data_sets import gaussian, generator


class Quantized(torch.Tensor):
    """int8 values with one scale that claim to be bfloat16, as quantizers for inference make them."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> "Quantized":
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.bfloat16)
        made.values_of, made.scale = values, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values_of", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].values_of, args[0].scale)
        raise NotImplementedError(func)


def quantized(*shape: int) -> nn.Parameter:
    values = torch.ones(shape, dtype=torch.int8)
    return nn.Parameter(Quantized(values, torch.ones(())), requires_grad=False)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = quantized(4, 32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return f8sub.grouped_linear(x, self.up, torch.tensor([2, 4, 6, 8]))


f8sub.register_experts(Experts)


def linear_of_quantized() -> nn.Module:
    layer = nn.Linear(32, 32, bias=False)
    layer.weight = quantized(32, 32)
    return layer


@pytest.mark.parametrize("make", [linear_of_quantized, Experts], ids=["linear", "experts"])
def test_a_quantized_weight_is_refused(make):
    model = nn.Sequential(make())
    with pytest.raises(f8sub.Float8ConfigError, match=r"Quantized, a tensor of other tensors"):
        f8sub.convert_to_float8(model, "rowwise", experts=True, skip_defaults=False)


def test_weights_that_are_values_are_not():
    model = converted()
    for weight in (model[0].weight, nn.Parameter(torch.ones(32, 32)), torch.ones(2, 2)):
        assert why_not_weight(weight) is None


class Theirs(nn.Linear):
    """A layer of another library."""


def replace(model: nn.Module, *names: str) -> None:
    for name in names:
        ours = model.get_submodule(name)
        theirs = Theirs(ours.in_features, ours.out_features)
        theirs.weight, theirs.bias = ours.weight, ours.bias
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, theirs)


class OfValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 32, 32))

    forward = Experts.forward


f8sub.register_experts(OfValues)


@pytest.mark.parametrize(
    "given",
    [quantized, lambda *shape: nn.Parameter(torch.ones(shape).to(torch.float8_e4m3fn), requires_grad=False)],
    ids=["quantized", "codes"],
)
def test_a_quantized_weight_in_the_place_of_a_converted_one_is_refused(given):
    model = nn.Sequential(nn.Linear(32, 32), OfValues())
    f8sub.convert_to_float8(model, "rowwise", experts=True, skip_defaults=False)
    before = dict(model.named_parameters())
    with pytest.raises(
        f8sub.Float8ConfigError, match=r"^0\.weight: .* f8sub\.convert_from_float8\(model\) before"
    ):
        model[0].weight = given(32, 32)
    with pytest.raises(
        f8sub.Float8ConfigError, match=r"^1\.up: .* f8sub\.convert_from_float8\(model\) before"
    ):
        model[1].up = given(4, 32, 32)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    model[0].weight = nn.Parameter(torch.ones(32, 32))  # values
    f8sub.convert_from_float8(model)
    model[0].weight, model[1].up = given(32, 32), given(4, 32, 32)


def converted(**options: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32)), nn.Linear(32, 32))
    return f8sub.convert_to_float8(model, "rowwise", skip_defaults=False, **options)


def told(model: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f8sub.precompute_scales(model)
    return [str(each.message) for each in caught if issubclass(each.category, f8sub.Float8Warning)]


@pytest.mark.parametrize("called_before", [False, True])
def test_replaced_layers_are_told_once(called_before):
    model = converted()
    model(gaussian((4, 32), generator(1)))
    if called_before:
        assert told(model) == []
    replace(model, "0", "1.0")
    (message,) = told(model)
    assert message.startswith("0, 1.0: converted to float8 by f8sub, and replaced since by tests.")
    assert "Theirs" in message
    assert told(model) == []
    replace(model, "2")  # none is left
    (message,) = told(model)
    assert message.startswith("0, 1.0, 2: converted")


def told_by_a_step(model: nn.Module) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(2):
            model(gaussian((4, 32), generator(seed))).square().mean().backward()
            optimizer.step()
    return [str(each.message) for each in caught if issubclass(each.category, f8sub.Float8Warning)]


def test_replaced_layers_are_told_by_a_step():
    """Where weights are not sharded nothing else of f8sub need ever be called."""
    model = converted()
    replace(model, "0", "1.0", "2")
    (message,) = told_by_a_step(model)
    assert message.startswith("0, 1.0, 2: converted to float8 by f8sub, and replaced since by tests.")
    model = converted()
    assert told_by_a_step(model) == []
    replace(model, "1.0")
    (message,) = told_by_a_step(model)  # of another optimizer
    assert message.startswith("1.0: converted")


def test_replaced_layers_are_told_by_the_first_forward_once():
    """Of a model that only evaluates; and neither a step nor ``precompute_scales`` tells it again."""
    model = converted()
    replace(model, "0", "1.0")
    with pytest.warns(f8sub.Float8Warning) as caught:
        model(gaussian((4, 32), generator(1)))
    (warning,) = caught
    assert warning.filename == __file__
    assert str(warning.message).startswith(
        "0, 1.0: converted to float8 by f8sub, and replaced since by tests."
    )
    assert told_by_a_step(model) == []
    assert told(model) == []


def test_the_report_says_that_a_layer_was_replaced():
    model = converted()
    replace(model, "0")
    report = f8sub.conversion_report(model)
    (detail,) = [layer.detail for layer in report.layers if not layer.converted]
    assert detail == f"it was converted, and replaced since by {Theirs.__module__}.Theirs"


def tied(model: nn.Module) -> nn.Module:
    model[2].weight = model[0].weight
    del model[0]
    return model


def wrapped(model: nn.Module) -> nn.Module:
    model[0] = nn.Sequential(model[0])
    return model


def shorter(model: nn.Module) -> nn.Module:
    del model[1]
    return model


def back_in_part(model: nn.Module) -> nn.Module:
    f8sub.convert_from_float8(model[1])
    f8sub.convert_from_float8(model[0])
    return model


def without_weights(model: nn.Module) -> nn.Module:
    model[2] = nn.Identity()
    return model


@pytest.mark.parametrize("change", [wrapped, shorter, back_in_part, without_weights, copy.deepcopy])
def test_no_other_change_of_a_model_is(change):
    model = converted()
    assert told(model) == []
    assert told(change(model)) == []


@pytest.mark.parametrize("change", [wrapped, shorter, tied, back_in_part, without_weights, copy.deepcopy])
def test_no_other_change_of_a_model_is_by_a_step(change):
    assert told_by_a_step(change(converted())) == []
