"""convert_to_float8 and back: what is converted, what is not and why, what survives, copies and checkpoints."""

import copy
import dataclasses
import pickle
import weakref
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import f8sub
from f8sub.weights.master_weight import MasterWeight
from tests.convert.models import K, Mlp, N, converted, mlp, reasons, x_of
from tests.data_sets import gaussian, generator
from tests.layers import on_each_recipe
from tests.models import Transformer, seed_weights


@on_each_recipe
def test_it_returns_the_model_with_its_layers_swapped_in_place(recipe):
    model = mlp()
    up = model.up
    assert f8sub.convert_to_float8(model, recipe=recipe) is model
    assert model.up is up
    assert type(up) is f8sub.Float8Linear
    assert isinstance(up, nn.Linear)
    assert converted(model) == ["up", "down"]
    assert reasons(model) == {"lm_head": "output head (default)"}
    assert type(model.lm_head) is nn.Linear


def test_parameters_keep_identity_values_and_names():
    model = mlp()
    before = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in before.items()}
    f8sub.convert_to_float8(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    for name, parameter in after.items():
        assert parameter is before[name]
        assert isinstance(parameter, nn.Parameter)
        assert torch.equal(parameter, values[name])
    assert isinstance(model.up.weight, MasterWeight)
    assert type(model.up.bias) is nn.Parameter


def test_what_users_put_on_a_model_survives():
    """Gradients, marks such as weight-decay groups set, hooks of tensors and of modules, eval mode."""
    model, seen = mlp().eval(), []
    model(x_of()).backward(gaussian((8, 16), generator(2)))
    grad, weight = model.down.weight.grad, model.up.weight
    model.lm_head.weight.requires_grad_(False)
    model.down.weight.requires_grad_(False)
    weight.no_weight_decay = model.up.extra = "kept"
    weight.register_hook(lambda grad: seen.append("tensor hook"))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    model.up.register_forward_pre_hook(lambda m, args: seen.append("before"))
    model.up.register_forward_hook(lambda m, args, out: seen.append("forward"))
    f8sub.convert_to_float8(model)
    assert model.down.weight.grad is grad
    assert [la.weight.requires_grad for la in (model.up, model.down, model.lm_head)] == [True, False, False]
    assert [holder.no_weight_decay for holder in (model.up.weight, weight)] == ["kept"] * 2
    assert (model.up.extra, model.up.training, model.training) == ("kept", False, False)
    model(x_of()).backward(gaussian((8, 16), generator(2)))
    assert seen == ["before", "forward", "tensor hook", "accumulated"]


def test_tied_layers_stay_tied():
    model = nn.ModuleList([nn.Linear(K, K), nn.Linear(K, K), nn.Linear(K, K)])
    model[2].weight = model[0].weight
    tied = model[0].weight
    f8sub.convert_to_float8(model)
    assert model[0].weight is model[2].weight is tied
    assert isinstance(tied, MasterWeight)
    assert model[1].weight is not tied
    assert len(list(model.parameters())) == 2 + 3


def test_tied_layers_stay_tied_where_another_tensor_takes_the_weights_place():
    """Torch cannot swap a tensor that something refers to weakly."""
    model = nn.ModuleList([nn.Linear(K, K), nn.Linear(K, K)])
    model[1].weight = model[0].weight
    old = weakref.ref(model[0].weight)
    f8sub.convert_to_float8(model)
    assert old() is None
    assert model[0].weight is model[1].weight
    assert isinstance(model[0].weight, MasterWeight)


def test_a_layer_that_occurs_twice_is_converted_once():
    layer = nn.Linear(K, K)
    model = f8sub.convert_to_float8(nn.Sequential(layer, nn.ReLU(), layer))
    assert model[0] is model[2] is layer
    assert type(layer) is f8sub.Float8Linear
    assert converted(model) == ["0"]


def test_a_transformer_encoder_layer_takes_no_fast_path_around_its_layers():
    layer = nn.TransformerEncoderLayer(K, 2, N, batch_first=True, dropout=0.0).eval()
    plain_y = layer(x_of(2, 5, K))
    f8sub.convert_to_float8(layer)
    assert converted(layer) == ["linear1", "linear2"]
    with torch.no_grad():
        y = layer(x_of(2, 5, K))
        seen = []
        layer.linear1.register_forward_hook(lambda *args: seen.append(1))
        layer(x_of(2, 5, K))
    assert seen == [1]
    assert not torch.equal(y, plain_y)


def test_the_default_recipe_and_aliases_of_options():
    assert f8sub.convert_to_float8(mlp()).up._f8sub.plan.recipe == f8sub.get_recipe("tensorwise")
    assert f8sub.convert_to_float8(mlp(), recipe_name="rowwise").up._f8sub.plan.recipe.name == "rowwise"
    wire = [
        hasattr(f8sub.convert_to_float8(mlp(), **{name: value}).up.weight, "fsdp_pre_all_gather")
        for name in ("float8_all_gather", "enable_fsdp_float8_all_gather")
        for value in (True, False)
    ]
    assert wire == [True, False, True, False]


BAD = {
    "recipe": ({"recipe": "int8"}, "unknown recipe 'int8'"),
    "recipe_name": ({"recipe_name": "int8"}, "unknown recipe 'int8'"),
    "backend": ({"backend": "cutlass"}, "unknown backend 'cutlass'"),
    "two-recipes": ({"recipe": "rowwise", "recipe_name": "blockwise"}, "give one of them"),
    "torchao-filter": (
        {"recipe": lambda module, fqn: True},
        r"second argument .* is the recipe, got a function; .*f8sub\.convert_to_float8\(model, .*filter_fn=",
    ),
    "torchao-config": (
        {"recipe": SimpleNamespace()},
        r"got a SimpleNamespace of types: f8sub's call is f8sub\.convert_to_float8\(model, recipe=",
    ),
    "torchao-keyword": ({"config": SimpleNamespace()}, r"no option 'config'.*use recipe; .*model, recipe="),
    "other-keyword": (
        {"fp8_recipe": "delayed"},
        r"no option 'fp8_recipe', got fp8_recipe='delayed': use recipe",
    ),
    "emulate": ({"emulate": True}, r"use backend=\"reference\""),
    "typo": ({"keep_xs": "auto"}, "use keep_x"),
    "skip": ({"skip": [1]}, "skip takes patterns of layers' names, got 1"),
    "no list": ({"skip": None}, "skip takes patterns of layers' names, got None"),
    "min_dim": ({"min_dim": 0.5}, "min_dim is a number of features or None, got 0.5"),
    "no-pattern": ({"recipe": {0: "rowwise"}}, "glob patterns over their names, got 0"),
}


@pytest.mark.parametrize("name", BAD, ids=list(BAD))
def test_a_bad_option_is_an_error_and_changes_nothing(name):
    options, message = BAD[name]
    model = mlp()
    with pytest.raises(f8sub.Float8ConfigError, match=message):
        f8sub.convert_to_float8(model, **options)
    assert type(model.up) is nn.Linear
    assert type(model.up.weight) is nn.Parameter
    f8sub.convert_to_float8(model)


def test_nothing_to_convert_is_an_error():
    with pytest.raises(f8sub.Float8ConfigError, match=r"nothing to convert.*skip='\*'.*strict=False"):
        f8sub.convert_to_float8(mlp(), skip=("*",))
    without = r"no nn.Linear layer; nor does f8sub convert its Conv2d\."
    with pytest.raises(f8sub.Float8ConfigError, match=without):
        f8sub.convert_to_float8(nn.Sequential(nn.Conv2d(3, 16, 3)))
    model = mlp()
    with pytest.warns(
        f8sub.Float8Warning, match=r"nothing to convert.*Loosen skip, filter_fqns or filter_fn$"
    ):
        assert f8sub.convert_to_float8(model, skip=("*",), strict=False) is model
    assert type(model.up) is nn.Linear
    with pytest.raises(f8sub.Float8ConfigError, match=r"takes a model, a torch\.nn\.Module, got None"):
        f8sub.convert_to_float8(None)


def test_converting_twice_is_a_warning_and_changes_nothing():
    model = f8sub.convert_to_float8(mlp())
    y = model(x_of())
    weights, hooks = dict(model.named_parameters()), dict(model._forward_pre_hooks)
    with pytest.warns(f8sub.Float8Warning, match="again and found nothing more to convert"):
        f8sub.convert_to_float8(model)
    assert all(parameter is weights[name] for name, parameter in model.named_parameters())
    assert dict(model._forward_pre_hooks) == hooks
    assert torch.equal(model(x_of()), y)


def test_converting_with_another_recipe_is_an_error():
    model = f8sub.convert_to_float8(mlp(), recipe="rowwise")
    told = r"up is already.*'rowwise'.*'tensorwise'.*convert_from_float8"
    with pytest.raises(f8sub.Float8ConfigError, match=told):
        f8sub.convert_to_float8(model, recipe="tensorwise")


def test_a_second_conversion_takes_more_layers():
    model = f8sub.convert_to_float8(mlp(), skip=("down", "lm_head"))
    f8sub.convert_to_float8(model)
    assert converted(model) == ["up", "down"]
    assert torch.equal(model(x_of()), f8sub.convert_to_float8(mlp())(x_of()))


def test_the_root_itself():
    layer = seed_weights(nn.Sequential(nn.Linear(K, N)))[0]
    assert f8sub.convert_to_float8(layer) is layer
    assert converted(layer) == ["(root)"]
    with pytest.raises(TypeError, match=r"^\(root\): "):
        layer(torch.zeros(8, K, dtype=torch.int64))


@on_each_recipe
def test_meta_device_then_to_empty(recipe):
    with torch.device("meta"):
        model = Mlp()
    f8sub.convert_to_float8(model, recipe=recipe)
    assert model.up.weight.is_meta
    model.to_empty(device="cpu")
    assert isinstance(model.up.weight, MasterWeight)
    seed_weights(model)
    expected = f8sub.convert_to_float8(mlp(), recipe=recipe)
    assert torch.equal(model(x_of()), expected(x_of()))
    before = model(x_of())
    with torch.no_grad():
        model.up.weight.mul_(2)
    assert not torch.equal(model(x_of()), before)


@pytest.mark.parametrize("world", [1])
def test_converting_after_fully_shard_is_an_error(rank, world):
    model = mlp()
    fully_shard(model.up)
    with pytest.raises(f8sub.Float8ConfigError, match=r"up is already sharded.*before fully_shard"):
        f8sub.convert_to_float8(model)
    assert type(model.down) is nn.Linear


@pytest.mark.parametrize("world", [1])
def test_converting_back_after_fully_shard_is_an_error_of_its_own(rank, world):
    model = f8sub.convert_to_float8(mlp())
    fully_shard(model)
    with pytest.raises(
        f8sub.Float8ConfigError, match="convert_from_float8 takes a model before it is sharded"
    ) as told:
        f8sub.convert_from_float8(model)
    assert "call convert_to_float8" not in str(told.value)


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
    assert twin.up._f8sub.conversion is twin.down._f8sub.conversion
    assert twin.up._f8sub.conversion is not model.up._f8sub.conversion
    assert {record.module for record in twin.up._f8sub.conversion} == {twin.up, twin.down}
    assert {record.module for record in model.up._f8sub.conversion} == {model.up, model.down}
    before = model(x_of())
    for changed, other in ((twin, model), (model, twin)):
        with torch.no_grad():
            changed.up.weight.mul_(3)
        assert torch.equal(other(x_of()), before) == (other is model)
    assert torch.equal(twin(x_of()), model(x_of()))


def test_lazy_layers_stay_until_they_have_weights():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(64), nn.Linear(64, 64))
    f8sub.convert_to_float8(model)
    report = f8sub.conversion_report(model)
    assert report.flops_share == 1
    assert "the weight of this LazyLinear has no shape yet" in str(report)
    model(torch.ones(2, 3, 8, 8))
    f8sub.convert_to_float8(model)
    assert [type(layer) for layer in model[2:]] == [f8sub.Float8Linear] * 2
    with pytest.raises(f8sub.Float8ConfigError, match="run a batch through the model first"):
        f8sub.convert_to_float8(nn.Sequential(nn.LazyLinear(64)))


def test_a_weight_that_something_holds_is_converted_back_too():
    """Torch cannot swap it, so its layer gets another parameter."""
    model = f8sub.convert_to_float8(mlp())
    held, before = weakref.ref(model.up.weight), model.up.weight.detach().clone()
    f8sub.convert_from_float8(model)
    assert held() is not model.up.weight
    assert type(model.up.weight.data) is torch.Tensor
    assert torch.equal(model.up.weight, before)


def _lazy(first: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(first=first, inner=nn.Linear(64, 64), out=nn.Linear(64, 64)))


@pytest.mark.parametrize(
    "call",
    [
        f8sub.estimate,
        f8sub.estimate_step,
        lambda model: f8sub.conversion_report(model, batch=torch.ones(2, 64)),
        f8sub.float8_state_dict,
        lambda model: f8sub.save_float8(model, "not_written"),
    ],
)
@pytest.mark.parametrize("is_converted", [False, True])
def test_calls_that_need_shapes_name_the_lazy_module(call, is_converted):
    model = _lazy(nn.LazyLinear(64))
    if is_converted:
        f8sub.convert_to_float8(model, min_dim=0)
    told = "^first: the weight of this LazyLinear has no shape yet; run a batch through the model first$"
    with pytest.raises(f8sub.Float8ConfigError, match=told):
        call(model)


def test_a_lazy_module_without_parameters_has_buffers_without_shapes():
    model = _lazy(nn.LazyBatchNorm1d(affine=False))
    with pytest.raises(f8sub.Float8ConfigError, match="first: the running_mean of this LazyBatchNorm1d"):
        f8sub.estimate(model)
    model(torch.ones(2, 64))
    assert "Sequential" in str(f8sub.estimate(model, "tensorwise"))


def test_the_plans_of_a_model_from_another_process_have_keys_of_this_one():
    """What they stand for there is none of this process's business."""
    model, other = (f8sub.convert_to_float8(mlp(), recipe=recipe) for recipe in ("rowwise", "tensorwise"))
    sent = copy.deepcopy(model)
    assert sent.up._f8sub.plan is model.up._f8sub.plan
    for key in ("elsewhere", other.up._f8sub.plan.key):
        for layer in (sent.up, sent.down):
            layer._f8sub.plan = dataclasses.replace(model.up._f8sub.plan, key=key)
        arrived = pickle.loads(pickle.dumps(sent))
        assert arrived.up._f8sub.plan is arrived.down._f8sub.plan is model.up._f8sub.plan
        with f8sub.autocast("tensorwise"):
            assert torch.equal(arrived(x_of()), other(x_of()))
