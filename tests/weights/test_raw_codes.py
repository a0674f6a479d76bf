"""Codes without their scales, of float8 or integers, written to a converted weight in every way that torch has."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import f8sub
from tests.contract.test_twins import FORMS, Form, x_of
from tests.data_sets import gaussian, generator
from tests.models import refusal

Write = Callable[[nn.Module, str, torch.Tensor], Any]

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8]


def load(module: nn.Module, name: str, codes: torch.Tensor, *, assign: bool) -> None:
    module.load_state_dict({**module.state_dict(), name: codes}, assign=assign)


WRITES: dict[str, Write] = {
    "copy_": lambda m, name, codes: getattr(m, name).copy_(codes),
    "copy_ to .data": lambda m, name, codes: getattr(m, name).data.copy_(codes),
    "copy_ to detach()": lambda m, name, codes: getattr(m, name).detach().copy_(codes),
    "rows": lambda m, name, codes: getattr(m, name)[:1].copy_(codes[:1]),
    "item": lambda m, name, codes: getattr(m, name).data.__setitem__(0, codes[0]),
    "foreach": lambda m, name, codes: torch._foreach_copy_([getattr(m, name)], [codes]),
    "load_state_dict": lambda m, name, codes: load(m, name, codes, assign=False),
    "load_state_dict(assign=True)": lambda m, name, codes: load(m, name, codes, assign=True),
    "a parameter": lambda m, name, codes: setattr(m, name, nn.Parameter(codes, requires_grad=False)),
    "register_parameter": lambda m, name, codes: m.register_parameter(name, nn.Parameter(codes, False)),
}
"""What is refused at once."""

REBINDS: dict[str, Write] = {
    ".data =": lambda m, name, codes: setattr(getattr(m, name), "data", codes),
    "_parameters": lambda m, name, codes: m._parameters.update({name: nn.Parameter(codes, False)}),
    "swap_tensors": lambda m, name, codes: torch.utils.swap_tensors(
        getattr(m, name), nn.Parameter(codes, False)
    ),
}
"""What no operator shows: the next forward is refused."""


def codes_of(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes that fill the dtype, of a weight's shape."""
    return (gaussian(tuple(weight.shape), generator(4)) * 20).clamp(0, 120).to(dtype)


def model_of(form: Form, primary: bool) -> nn.Module:
    model = form.converted("tensorwise", primary_weights=primary)
    if primary:
        f8sub.optim.MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
    return model


@pytest.mark.parametrize("primary", [False, True], ids=["master", "primary"])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("way", WRITES)
def test_writes_are_refused_and_change_nothing(way, name, primary):
    form = FORMS[name]
    model, attribute = model_of(form, primary), form.weights[-1]
    before = model(x_of())
    for dtype in DTYPES:
        codes = codes_of(getattr(model.layer, attribute), dtype)
        with torch.no_grad():
            message = refusal(f8sub.Float8ConfigError, WRITES[way], model.layer, attribute, codes)
        fqn = "layer" if form.is_linear else f"layer.{attribute}"
        assert message.startswith(fqn)
        assert str(dtype) in message
        assert torch.equal(model(x_of()), before)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("way", REBINDS)
def test_the_next_forward_refuses_a_weight_that_became_codes(way, name):
    form = FORMS[name]
    for dtype in DTYPES:
        model, attribute = form.converted("tensorwise"), form.weights[-1]
        codes = codes_of(getattr(model.layer, attribute), dtype)
        # torch gives integers to no tensor that takes gradients.
        getattr(model.layer, attribute).requires_grad_(False)
        REBINDS[way](model.layer, attribute, codes)
        for around in (f8sub.autocast(), f8sub.autocast(enabled=False)):
            with around:
                message = refusal(f8sub.Float8ConfigError, model, x_of())
            assert message.startswith("layer: its weight gets " + str(dtype))


@pytest.mark.parametrize("way", ["copy_", "foreach", "copy_ to .data"])
def test_values_of_every_other_dtype_are_written(way):
    """Bool too: a mask is no code; and a weight that is seen as bytes takes bytes."""
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.bool):
        for primary in (False, True):
            model = model_of(FORMS["linear"], primary)
            values = (gaussian(tuple(model.layer.weight.shape), generator(4)) * 4).to(dtype)
            with torch.no_grad():
                WRITES[way](model.layer, "weight", values)
            assert torch.equal(model.layer.weight.detach().clone(), values.float())
    model = model_of(FORMS["linear"], False)
    values = gaussian(tuple(model.layer.weight.shape), generator(4))
    with torch.no_grad():
        model.layer.weight.view(torch.uint8).copy_(values.view(torch.uint8))
    assert torch.equal(model.layer.weight.detach().clone(), values)


def test_a_float8_tensor_brings_its_scales():
    model = FORMS["linear"].converted("tensorwise")
    values = f8sub.quantize(
        gaussian(tuple(model.layer.weight.shape), generator(4)), "tensorwise", operand="w"
    )
    with torch.no_grad():
        model.layer.weight.copy_(values)
    assert torch.equal(model.layer.weight.detach().clone(), values.dequantize())


def test_set_takes_no_other_dtype():
    """By torch's own check, before anything is written."""
    layer = FORMS["linear"].converted("tensorwise").layer
    with torch.no_grad(), pytest.raises(RuntimeError, match="Could not set tensor of type"):
        layer.weight.set_(codes_of(layer.weight, torch.float8_e4m3fn))
