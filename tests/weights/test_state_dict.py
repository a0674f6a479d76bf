"""What ``model.state_dict()`` holds: plain tensors in the weights' memory, and whoever writes to them is seen."""

import copy

import pytest
import torch
from torch import nn

import f8sub
from f8sub.weights.master_weight import MasterWeight
from tests.counting import Float8Work
from tests.data_sets import gaussian, generator
from tests.experts.models import of_transformers
from tests.layers import K, N, dy_of, x_of

M = 8


def plain(seed: int = 1) -> nn.Sequential:
    layer = nn.Linear(K, N, bias=False)
    with torch.no_grad():
        layer.weight.copy_(gaussian((N, K), generator(seed)))
    return nn.Sequential(layer)


def made(primary: bool = False, seed: int = 1) -> nn.Sequential:
    return f8sub.convert_to_float8(plain(seed), primary_weights=primary)


def fresh_output(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What a layer converted just now gives with these values."""
    model = made()
    with torch.no_grad():
        model[0].weight.copy_(values)
    return model(x)


def through_numpy(weight: torch.Tensor) -> None:
    weight.numpy()[:] *= 3


WRITES = {
    "mul_": lambda w: w.mul_(3),
    "copy_": lambda w: w.copy_(gaussian((N, K), generator(5))),
    "data": lambda w: w.data.mul_(3),
    "foreach": lambda w: torch._foreach_mul_([w], 3.0),
    "view": lambda w: w.view(-1)[5:].mul_(3),
    "numpy": through_numpy,
    "storage": lambda w: torch.tensor([], dtype=w.dtype).set_(w.untyped_storage()).mul_(3),
}


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp"])
def test_backward_after_a_foreach_write_is_torchs_error(recipe, held):
    """As of plain weights, whether or not a state dict keeps codes from being kept."""
    for model in (plain(), f8sub.convert_to_float8(plain(), recipe)):
        state = model.state_dict() if held else None
        y = model(x_of(M, K).requires_grad_())
        dy = dy_of(y)
        with torch.no_grad():
            torch._foreach_mul_([model[0].weight], 3.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(dy)
        del state


def test_it_holds_plain_tensors_in_the_weights_memory():
    model = made()
    for held in (model.state_dict()["0.weight"], model[0].state_dict()["weight"]):
        assert type(held) is torch.Tensor
        assert not held.requires_grad
        assert held.data_ptr() == model[0].weight.data_ptr()
        assert type(held.clone()) is type(copy.deepcopy(held)) is torch.Tensor
    assert model.state_dict(keep_vars=True)["0.weight"] is model[0].weight


@pytest.mark.parametrize("name", WRITES, ids=list(WRITES))
def test_a_write_to_it_is_seen_at_once_and_after_it_is_gone(name):
    model, x = made(), x_of(M, K)
    model(x)
    held = model.state_dict()["0.weight"]
    for _ in range(2):
        WRITES[name](held)
        assert torch.equal(model(x), fresh_output(held, x))
    values, view = held.clone(), held.view(-1)
    del held
    view.mul_(2)  # the last write
    del view
    assert torch.equal(model(x), fresh_output(2 * values, x))


def casts_of_the_weight(model: nn.Module) -> int:
    with Float8Work() as work:
        model(x_of(M, K)).backward(dy_of(torch.zeros(M, N)))
    return sum(shape in ((N, K), (K, N)) for shape in work.casts)


def test_codes_are_kept_again_once_it_is_gone():
    """While it is there each forward and each backward casts; a model that is saved now and then casts once more."""
    model = made()
    model(x_of(M, K))
    assert casts_of_the_weight(model) == 0
    held = model.state_dict()
    assert casts_of_the_weight(model) == casts_of_the_weight(model) > 1
    del held
    assert [casts_of_the_weight(model) for _ in range(3)] == [1, 0, 0]


def test_assigned_to_a_plain_model_it_leaves_no_subclass_there():
    converted, plain = made(), nn.Sequential(nn.Linear(K, N, bias=False))
    plain.load_state_dict(converted.state_dict(), assign=True)
    assert type(plain[0].weight) is nn.Parameter
    assert type(plain[0].weight.detach()) is torch.Tensor
    x = x_of(M, K)
    assert torch.equal(plain(x), x @ converted[0].weight.detach().t())
    converted(x)
    with torch.no_grad():
        plain[0].weight.mul_(3)  # torch shares the memory, too
    assert torch.equal(converted(x), fresh_output(plain[0].weight.detach(), x))


def test_assigned_to_a_converted_model_it_is_watched_for_as_long_as_others_hold_it():
    model, x = made(), x_of(M, K)
    given = {"0.weight": gaussian((N, K), generator(7))}
    model.load_state_dict(given, assign=True)
    model(x)
    given["0.weight"].data.mul_(3)
    assert torch.equal(model(x), fresh_output(given["0.weight"], x))
    given.clear()
    assert [casts_of_the_weight(model) for _ in range(2)] == [1, 0]


def test_masters_of_primary_weights_are_plain_there_too():
    """The optimizer's, and the model's, which is the master where both are float32."""
    model, x = made(primary=True), x_of(M, K)
    optimizer = f8sub.optim.MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
    model(x).backward(dy_of(torch.zeros(M, N)))
    optimizer.step()
    model(x)
    for held in (optimizer.state_dict()["state"][0]["master"], model.state_dict()["0.weight"]):
        assert type(held) is type(held.clone()) is torch.Tensor
        held.data.mul_(3)
        assert torch.equal(model(x), fresh_output(held, x))


def test_a_state_dict_assigned_where_torch_swaps_tensors_makes_a_master_weight():
    state = {"0.weight": gaussian((64, 64), generator(1)), "0.bias": torch.zeros(64)}
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64)), skip_defaults=False)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(state, assign=True)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert isinstance(model[0].weight, MasterWeight)
    assert model[0].weight.record is not None


RAW = (torch.float8_e4m3fn, torch.float8_e5m2)


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["linear", "primary", "experts"])
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", RAW)
def test_codes_without_scales_are_refused(kind, assign, dtype):
    """torch would take them as numbers: 288 for a weight of 0.288."""
    if kind == "experts":
        model = f8sub.convert_to_float8(of_transformers("qwen3_moe"), "rowwise", experts=True, min_dim=0)
        name = "model.layers.0.mlp.experts.down_proj"
    else:
        model, name = made(primary=kind == "primary"), "0.weight"
    before = values_of(model)
    for each in (dtype, torch.int8, torch.uint8):  # as other quantizers store them
        codes = torch.full_like(before[name], 1.1).to(each)
        with pytest.raises(
            f8sub.Float8ConfigError, match=rf"^{name}: the state dict has {each} .* f8sub\.load_float8"
        ):
            model.load_state_dict({name: codes}, strict=False, assign=assign)
    owner, _, leaf = name.rpartition(".")
    with pytest.raises(
        f8sub.Float8ConfigError, match=rf"^{owner}: its parameters .* {dtype}, .* f8sub\.load_float8"
    ):
        model.get_submodule(owner).to(dtype)
    with pytest.raises(f8sub.Float8ConfigError, match="by a cast without scales"):
        model.to(dtype)
    assert torch.equal(model.state_dict()[name], before[name])
    model.get_submodule(owner).to(torch.bfloat16)
    assert getattr(model.get_submodule(owner), leaf).dtype == torch.bfloat16
