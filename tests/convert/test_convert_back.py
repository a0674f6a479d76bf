"""convert_from_float8, copies and checkpoints of converted models, and the report."""

import copy
import dataclasses
import pickle

import torch
from torch import nn

import f8sub
from tests.convert.models import K, Mlp, converted, mlp, x_of
from tests.data_sets import gaussian, generator
from tests.layers import on_each_recipe
from tests.models import Transformer


@on_each_recipe
def test_back_to_plain_layers_is_bitwise(recipe):
    expected = mlp()
    model = f8sub.convert_to_float8(mlp(), recipe=recipe)
    parameters = dict(model.named_parameters())
    assert not torch.equal(model(x_of()), expected(x_of()))
    assert f8sub.convert_from_float8(model) is model
    assert [type(layer) for layer in (model.up, model.down)] == [nn.Linear] * 2
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter
        assert parameter is parameters[name]
    assert torch.equal(model(x_of()), expected(x_of()))
    assert set(vars(model.up)) == set(vars(expected.up))
    assert not model._forward_pre_hooks
    assert converted(model) == []


def test_back_and_forth():
    model = Transformer()
    fresh = f8sub.convert_to_float8(copy.deepcopy(model), recipe="rowwise")
    f8sub.convert_from_float8(f8sub.convert_to_float8(model))
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    f8sub.convert_to_float8(model, recipe="rowwise")
    assert torch.equal(model(x_of(2, 4, K)), fresh(x_of(2, 4, K)))


def test_back_keeps_ties_gradients_and_hooks():
    model = nn.Sequential(nn.Linear(K, K), nn.Linear(K, K))
    model[1].weight = model[0].weight
    seen = []
    model.register_forward_hook(lambda *args: seen.append(1))
    f8sub.convert_to_float8(model)
    model(x_of()).backward(gaussian((8, K), generator(2)))
    grad = model[0].weight.grad.clone()
    f8sub.convert_from_float8(model)
    assert model[0].weight is model[1].weight
    assert torch.equal(model[0].weight.grad, grad)
    model(x_of())
    assert seen == [1, 1]


@on_each_recipe
def test_a_deep_copy_of_the_model(recipe):
    model = f8sub.convert_to_float8(mlp(), recipe=recipe)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x_of()), model(x_of()))
    assert twin.up.converted is twin.down.converted
    assert twin.up.converted is not model.up.converted
    assert {record.module for record in twin.up.converted} == {twin.up, twin.down}
    assert {record.module for record in model.up.converted} == {model.up, model.down}
    with torch.no_grad():
        twin.up.weight.mul_(3)
    assert not torch.equal(twin(x_of()), model(x_of()))


def test_a_model_from_another_process_is_numbered_anew():
    """What its plans' numbers stand for there is none of this process's business."""
    model, other = (f8sub.convert_to_float8(mlp(), recipe=recipe) for recipe in ("rowwise", "tensorwise"))
    sent = copy.deepcopy(model)
    assert sent.up.plan is model.up.plan
    for number in (10**6, other.up.plan.number):
        for layer in (sent.up, sent.down):
            layer.plan = dataclasses.replace(model.up.plan, number=number)
        arrived = pickle.loads(pickle.dumps(sent))
        assert arrived.up.plan is arrived.down.plan is model.up.plan
        with f8sub.autocast("tensorwise"):
            assert torch.equal(arrived(x_of()), other(x_of()))


def test_plain_checkpoints_go_both_ways():
    model = f8sub.convert_to_float8(mlp())
    state = model.state_dict()
    assert list(state) == list(mlp().state_dict())
    other = Mlp()
    other.load_state_dict(state)
    assert type(other.up.weight) is nn.Parameter
    assert torch.equal(other.up.weight, mlp().up.weight)
    back = f8sub.convert_to_float8(Mlp())
    back.load_state_dict(mlp().state_dict())
    assert torch.equal(back(x_of()), model(x_of()))
