"""Float8 primary weights: before an optimizer has their masters, after, when those were dropped, and compiled."""

import copy
import io
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import f8sub
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.primary_weight import PrimaryWeight
from tests.layers import K, N, dy_of, x_of
from tests.models import equal, float8_layers, seed_weights
from tests.selection import long_but

RECIPES = [name for name in f8sub.recipe_names() if f8sub.get_recipe(name).delayed is None]
DTYPES = [torch.float32, torch.bfloat16]
on_each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=RECIPES)
on_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])


def plain(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return seed_weights(nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K))).to(dtype)


def made(recipe: str = "tensorwise", dtype: torch.dtype = torch.float32, primary: bool = True) -> nn.Module:
    return f8sub.convert_to_float8(plain(dtype), recipe=recipe, primary_weights=primary)


def wrapped(model: nn.Module, lr: float = 1e-2) -> f8sub.optim.MasterWeights:
    return f8sub.optim.MasterWeights(torch.optim.AdamW(model.parameters(), lr=lr))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 1) -> torch.Tensor:
    y = model(x_of(8, K, dtype=next(model.parameters()).dtype, seed=seed))
    y.backward(dy_of(y))
    optimizer.step()
    optimizer.zero_grad()
    return y.detach()


def kinds(model: nn.Module) -> set[type]:
    return {type(layer.weight) for layer in float8_layers(model)}


@on_each_dtype
@on_each_recipe
def test_training_is_that_of_high_precision_weights(recipe, dtype):
    """Outputs, gradients and weights of float32 weights, or of bf16 weights with masters, bit for bit."""
    model, other = made(recipe, dtype), made(recipe, dtype, primary=False)
    assert all(issubclass(kind, MasterWeight) for kind in kinds(model))
    optimizer = wrapped(model)
    assert all(issubclass(kind, PrimaryWeight) for kind in kinds(model))
    assert {p.dtype for p in optimizer.optimizer.param_groups[0]["params"]} == {torch.float32}
    assert model[0].weight.dtype == dtype
    expected = wrapped(other) if dtype == torch.bfloat16 else torch.optim.AdamW(other.parameters(), lr=1e-2)
    for seed in range(5):
        assert torch.equal(step(model, optimizer, seed), step(other, expected, seed))
    assert equal(model.state_dict(), other.state_dict())


def test_wider_inputs_meet_the_weights_as_the_model_has_them():
    """A bf16 weight is its master rounded to bf16, whatever a GEMM's dtype is."""
    outputs = []
    for primary in (True, False):
        model = made(dtype=torch.bfloat16, primary=primary)
        optimizer = wrapped(model)
        step(model, optimizer)
        outputs.append(model(x_of(8, K)))
    assert outputs[0].dtype == torch.float32
    assert torch.equal(*outputs)


def test_an_optimizer_that_was_not_wrapped_is_refused_before_it_changes_anything():
    model = made()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    model(x_of(8, K)).square().mean().backward()
    with pytest.raises(f8sub.Float8ConfigError, match="MasterWeights"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


TENSORWISE = f8sub.get_recipe("tensorwise")
REFUSED = {
    "high-precision-wire": ({"float8_all_gather": False}, "primary_weights"),
    "w-in-high-precision": ({"recipe": TENSORWISE.with_high_precision(dgrad=True)}, "primary_weights"),
    "delayed": ({"recipe": "delayed"}, r"0 with recipe 'delayed'.*past.*tensorwise"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_primary_weight_is_refused_at_conversion(case):
    options, message = REFUSED[case]
    model = plain()
    with pytest.raises(f8sub.Float8ConfigError, match=message):
        f8sub.convert_to_float8(model, primary_weights=True, **options)
    assert not float8_layers(model)


def test_a_weight_without_values_or_that_something_else_holds_becomes_no_primary_weight():
    """Once it is initialized and free, it does."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K))
    f8sub.convert_to_float8(model, primary_weights=True)
    with pytest.raises(f8sub.Float8ConfigError, match="meta"):
        wrapped(model)
    seed_weights(model.to_empty(device="cpu"))
    held = weakref.ref(model[0].weight)
    with pytest.raises(f8sub.Float8ConfigError, match=r"0: .*weak reference"):
        wrapped(model)
    assert held() is model[0].weight
    del held
    wrapped(model)
    x = x_of(8, K)
    assert torch.equal(model(x), made(primary=False)(x))


def test_what_dropped_weights_and_others_refuse():
    with pytest.raises(f8sub.Float8ConfigError, match="primary_weights=True"):
        f8sub.drop_high_precision(made(primary=False))
    model = made().requires_grad_(False)
    f8sub.drop_high_precision(model)
    with pytest.raises(RuntimeError, match="0: its high-precision values were dropped"):
        model[0].load_state_dict(plain()[0].state_dict())
    with pytest.raises(f8sub.Float8ConfigError, match=r"were dropped; call .* before drop_high_precision"):
        model.double()
    with pytest.raises(f8sub.Float8ConfigError, match="dropped"):
        wrapped(model.requires_grad_(True))


def test_a_tied_weight_that_something_holds_is_dropped_in_all_its_layers():
    """Torch cannot swap it, so all of its layers get the parameter that takes its place."""
    model = nn.Sequential(nn.Linear(K, K), nn.ReLU(), nn.Linear(K, K))
    model[2].weight = seed_weights(model)[0].weight
    expected = f8sub.convert_to_float8(copy.deepcopy(model))(x_of(8, K))
    f8sub.convert_to_float8(model, primary_weights=True).requires_grad_(False)
    held = weakref.ref(model[0].weight)
    f8sub.drop_high_precision(model)
    assert held() is not model[0].weight
    assert model[0].weight is model[2].weight
    assert model[0].weight.primary.master is None
    assert torch.equal(model(x_of(8, K)), expected)


def test_a_weight_is_not_parted_from_its_master():
    """One without a master moves."""
    model = made()
    wrapped(model)
    told = "0: to meta would part the weight from its master on cpu; move the model before MasterWeights"
    with pytest.raises(f8sub.Float8ConfigError, match=told):
        model.to("meta")
    model = made().requires_grad_(False)
    f8sub.drop_high_precision(model)
    assert model.to("meta")[0].weight.is_meta


def test_dropping_warns_where_nothing_is_frozen():
    model = made()
    with pytest.warns(f8sub.Float8Warning, match="drop_high_precision dropped nothing"):
        f8sub.drop_high_precision(model)
    model[0].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f8sub.drop_high_precision(model)


WRITES = {
    "copy_": lambda w, q: w.copy_(q),
    "lerp_": lambda w, q: w.lerp_(q, 0.5),
    "foreach": lambda w, q: torch._foreach_lerp_([w], [q], 0.25),
    "addmm_": lambda w, q: w.addmm_(q, q),
    "index_copy_": lambda w, q: w.index_copy_(0, torch.tensor([3]), q[:1]),
    "index_add_": lambda w, q: w.index_add_(0, torch.tensor([3, 3]), q[:2]),
    "scatter_": lambda w, q: w.scatter_(0, torch.ones(1, 64, dtype=torch.int64), q[:1]),
    "masked": lambda w, q: w.__setitem__(q > 0, q[q > 0]),
    "add_": lambda w, q: w.add_(q, alpha=0.5),
}


@pytest.mark.parametrize("from_a_converted_one", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_in_the_weight_s_dtype_reaches_the_master(write, from_a_converted_one):
    """Also what is read of another converted model: as the same operator does in float32."""
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64).bfloat16()), primary_weights=True)
    f8sub.optim.MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
    other = seed_weights(nn.Sequential(nn.Linear(64, 64).bfloat16()))
    weight, values = model[0].weight, other[0].weight.detach().clone()
    expected = weight.primary.master.plain.detach().clone()
    given = f8sub.convert_to_float8(other)[0].weight if from_a_converted_one else values
    with torch.no_grad():
        WRITES[write](weight, given)
        WRITES[write](expected, values.float())
    assert torch.equal(weight.primary.master.plain, expected)


@on_each_dtype
def test_state_dicts_are_plain_and_load_before_and_after_the_optimizer(dtype):
    source = seed_weights(plain(dtype), seed=4).state_dict()
    for load_first in (True, False):
        model = made(dtype=dtype)
        if load_first:
            model.load_state_dict(source)
        wrapped(model)
        if not load_first:
            model(x_of(8, K, dtype=dtype))
            model.load_state_dict(source)
        state = model.state_dict()
        assert state.keys() == source.keys()
        for name, value in state.items():
            assert not isinstance(value, PrimaryWeight)
            assert value.dtype == dtype
            assert torch.equal(value, source[name]), name
        x = x_of(8, K, dtype=dtype)
        expected = f8sub.convert_to_float8(plain(dtype))
        expected.load_state_dict(source)
        assert torch.equal(model(x), expected(x))


def test_assign_keeps_the_master_that_the_optimizer_has():
    model = made()
    optimizer = wrapped(model)
    source = seed_weights(plain(), seed=4).state_dict()
    weight = model[0].weight
    model[0].load_state_dict({"weight": source["0.weight"], "bias": source["0.bias"]}, assign=True)
    assert model[0].weight is weight
    assert torch.equal(optimizer.optimizer.param_groups[0]["params"][0], source["0.weight"])


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.bfloat16(),
        lambda model: setattr(model[0], "weight", nn.Parameter(torch.randn(N, K))),
    ],
    ids=["dtype", "assigned"],
)
def test_a_weight_replaced_after_the_optimizer_took_it_is_reported(change):
    model = made()
    optimizer = wrapped(model)
    with pytest.raises(f8sub.Float8ConfigError, match=r"0\b.*MasterWeights"):
        (change(model), step(model, optimizer))


def test_to_empty_and_initialized_again_it_trains_from_the_new_values():
    model = made()
    optimizer = wrapped(model)
    seed_weights(model.to_empty(device="cpu"), seed=6)
    expected = f8sub.convert_to_float8(seed_weights(plain(), seed=6))
    other = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    for seed in range(2):
        assert torch.equal(step(model, optimizer, seed), step(expected, other, seed))


def test_it_reads_as_the_tensor_it_stands_for():
    model = made(dtype=torch.bfloat16)
    wrapped(model)
    weight, value = model[0].weight, plain(torch.bfloat16)[0].weight
    assert torch.equal(weight, value)
    assert torch.equal(weight.t()[3:7] @ weight, value.t()[3:7] @ value)
    assert weight.norm() == value.norm()
    assert torch.equal(weight.float(), value.float())
    assert type(torch.zeros_like(weight)) is torch.Tensor
    assert "PrimaryWeight" in repr(weight)


def test_a_model_pickles_and_copies_as_high_precision():
    model = made(dtype=torch.bfloat16)
    wrapped(model)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert all(type(value) in (torch.Tensor, nn.Parameter) for value in loaded.values())
    twin = copy.deepcopy(model)
    assert all(issubclass(kind, MasterWeight) for kind in kinds(twin))
    x = x_of(8, K, dtype=torch.bfloat16)
    assert torch.equal(twin(x), model(x))
    optimizer = wrapped(twin)
    step(twin, optimizer)
    assert not torch.equal(twin(x), model(x))


def test_converted_back_it_has_the_values():
    model = made()
    wrapped(model)
    f8sub.convert_from_float8(model)
    assert type(model[0]) is nn.Linear
    assert torch.equal(model[0].weight, plain()[0].weight)


@on_each_dtype
@on_each_recipe
def test_dropped_weights_are_their_codes_and_compute_the_same(recipe, dtype):
    model = made(recipe, dtype)
    x = x_of(8, K, dtype=dtype)
    model.requires_grad_(False)
    expected = model(x).detach()
    values = [StorageWeakRef(layer.weight.untyped_storage()) for layer in float8_layers(model)]
    f8sub.drop_high_precision(model)
    assert torch.equal(model(x), expected)
    assert [storage.expired() for storage in values] == [True, True]
    assert torch.equal(model(x), expected)
    dequantized = f8sub.quantize(plain(dtype)[0].weight, recipe, operand="w").dequantize()
    assert torch.equal(model[0].weight, dequantized)
    assert torch.equal(model.state_dict()["0.weight"], dequantized)


def test_what_is_frozen_still_has_gradients_of_x():
    model, expected = made(), made(primary=False)
    for converted in (model, expected):
        converted[0].weight.requires_grad_(False)
    f8sub.drop_high_precision(model)
    optimizer, other = wrapped(model), torch.optim.AdamW(expected.parameters(), lr=1e-2)
    for seed in range(3):
        x, y = x_of(8, K, seed=seed), x_of(8, K, seed=seed)
        for network, stepping, input in ((model, optimizer, x), (expected, other, y)):
            output = network(input)
            output.backward(dy_of(output))
            stepping.step()
            stepping.zero_grad()
        assert torch.equal(x.grad, y.grad)
    assert model[0].weight.primary.master is None
    assert model[2].weight.primary.master is not None


def test_tied_weights_stay_tied():
    model = nn.Sequential(nn.Linear(K, K), nn.Linear(K, K))
    model[1].weight = model[0].weight
    f8sub.convert_to_float8(seed_weights(model), primary_weights=True)
    optimizer = wrapped(model)
    assert model[0].weight is model[1].weight
    before = model[0].weight.clone()
    step(model, optimizer)
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("recipe", long_but(["tensorwise", "mxfp8"], RECIPES))
@pytest.mark.parametrize(
    "dtype", long_but([torch.bfloat16], [torch.float32, torch.bfloat16]), ids=["fp32", "bf16"]
)
def test_compiled_training_is_bitwise_eager(recipe, dtype, fresh_compiler):
    model, expected = made(recipe, dtype), made(recipe, dtype)
    optimizer, other = wrapped(model), wrapped(expected)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        assert torch.equal(step(compiled, optimizer, seed), step(expected, other, seed))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(step(compiled, optimizer, 2), step(expected, other, 2))
    assert equal(model.state_dict(), expected.state_dict())


@pytest.mark.parametrize("recipe", long_but(["tensorwise", "mxfp8"], RECIPES))
def test_a_model_that_is_compiled_only_lets_go_of_its_high_precision_values_too(recipe, fresh_compiler):
    model, expected = made(recipe), made(recipe)
    x = x_of(8, K)
    held = [StorageWeakRef(layer.weight.untyped_storage()) for layer in float8_layers(model)]
    for converted in (model, expected):
        f8sub.drop_high_precision(converted.requires_grad_(False))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), expected(x))
    assert all(storage.expired() for storage in held)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_were_restored_take_an_optimizer_with_masters(dtype):
    """A plain one is refused, as before they were dropped; the masters are float32 and have the codes' values."""
    model = made(dtype=dtype)
    f8sub.drop_high_precision(model.requires_grad_(False))
    f8sub.restore_high_precision(model)
    model.requires_grad_(True)
    values = [layer.weight.detach().clone() for layer in float8_layers(model)]
    plain = torch.optim.SGD(model.parameters(), lr=1e-2)
    model(x_of(8, K)).square().mean().backward()
    with pytest.raises(f8sub.Float8ConfigError, match=r"SGD steps a weight .*MasterWeights"):
        plain.step()
    assert all(map(torch.equal, values, (layer.weight.detach().clone() for layer in float8_layers(model))))
    optimizer = wrapped(model)
    masters = [p for p in optimizer.optimizer.param_groups[0]["params"] if isinstance(p, MasterWeight)]
    assert [master.dtype for master in masters] == [torch.float32] * len(values)
    assert all(torch.equal(m.detach().clone().to(dtype), v) for m, v in zip(masters, values, strict=True))
    step(model, optimizer)
    trained = (layer.weight.detach().clone() for layer in float8_layers(model))
    assert not any(map(torch.equal, values, trained))
