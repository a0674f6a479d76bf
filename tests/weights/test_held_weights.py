"""NaN or infinity in weights that no table covers: told by name by a later ``precompute_scales``, without a wait."""

import pytest
import torch
from torch import nn

import f8sub
from f8sub.weights import non_finite
from tests.data_sets import gaussian, generator
from tests.models import Stack, seed_weights


def stack(recipe: str = "tensorwise", **options: object) -> nn.Module:
    return f8sub.convert_to_float8(seed_weights(Stack(32, 48, 64, 32)), recipe=recipe, **options)


def error_of(model: nn.Module) -> str:
    """What the next ``precompute_scales`` raises."""
    try:
        f8sub.precompute_scales(model)
    except f8sub.Float8NumericsError as error:
        return str(error)
    return ""


def spoil(weight: torch.Tensor, value: float) -> None:
    with torch.no_grad():
        weight[3, 5] = value


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    ("recipe", "primary"), [*((name, False) for name in f8sub.recipe_names()), ("rowwise", True)]
)
def test_a_bad_element_of_a_weight_that_is_not_sharded(recipe, value, primary):
    """The second call raises, and each one after it until the weight is repaired: as of a sharded one."""
    model = stack(recipe, primary_weights=primary)
    if primary:
        f8sub.optim.MasterWeights(torch.optim.SGD(model.parameters(), lr=1.0))
    x = gaussian((16, 32), generator(1))
    y = model(x)
    assert [error_of(model) for _ in range(3)] == ["", "", ""]
    weight = model.layers[1].weight
    before = weight.detach().clone()
    spoil(weight, value)
    messages = [error_of(model) for _ in range(4)]
    assert messages[0] == ""
    for message in messages[1:]:
        assert "master weight of layers.1 (" in message
    assert model(x).isnan().any()
    with torch.no_grad():
        weight.copy_(before)
    assert [error_of(model) for _ in range(3)] == ["", "", ""]
    assert torch.equal(model(x), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [1.0, torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rows", [2, non_finite.FEW // 32])
def test_amaxes_of_few_and_of_many_elements(rows, value, dtype):
    weights = [gaussian((rows + i, 64), generator(i)).to(dtype) for i in range(3)]
    weights[1][-1, 5] = value
    weights.insert(1, torch.empty(0, 64, dtype=dtype))
    found = non_finite.weight_amaxes(weights)
    expected = [
        each.double().abs().max() if each.numel() else torch.zeros((), dtype=torch.double) for each in weights
    ]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), torch.stack(expected), rtol=0, atol=0, equal_nan=True)


def test_a_bad_weight_that_a_roll_of_histories_reported_raises_again():
    """The error of delayed scaling comes first, and those of the weight after it, until that is repaired."""
    model = stack("delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(gaussian((16, 32), generator(1))).square().mean().backward()
    before = model.layers[1].weight.detach().clone()
    spoil(model.layers[1].weight, torch.nan)
    optimizer.step()
    messages = [error_of(model) for _ in range(4)]
    assert "w of layers.1 (" in messages[0]
    assert all("master weight of layers.1 (" in message for message in messages[1:])
    with torch.no_grad():
        model.layers[1].weight.copy_(before)
    assert [error_of(model) for _ in range(3)] == ["", "", ""]


def test_a_weight_that_does_not_change_is_looked_at_once(monkeypatch):
    looked = []
    amaxes = non_finite.weight_amaxes
    monkeypatch.setattr(
        non_finite, "weight_amaxes", lambda weights: looked.append(len(weights)) or amaxes(weights)
    )
    model = stack()
    for _ in range(3):
        f8sub.precompute_scales(model)
    with torch.no_grad():
        model.layers[2].weight.mul_(2.0)
    f8sub.precompute_scales(model)
    assert looked == [3, 1]


def test_a_view_that_wrote_unseen_and_is_gone():
    model = stack()
    held = model.state_dict()
    assert [error_of(model) for _ in range(2)] == ["", ""]
    held["layers.1.weight"].numpy()[3, 5] = torch.nan  # which counts no version
    del held
    messages = [error_of(model) for _ in range(2)]
    assert messages[0] == ""
    assert "layers.1 (" in messages[1]


def test_nothing_is_told_nor_looked_at_while_a_graph_is_captured(monkeypatch):
    """What was found before is told by the first call after that."""
    model = stack()
    spoil(model.layers[1].weight, torch.nan)
    assert error_of(model) == ""
    with monkeypatch.context() as captured:
        captured.setattr(non_finite, "is_capturing", lambda tensor: True)
        captured.setattr(non_finite.HostCopy, "read", lambda copy: pytest.fail("the host waits"))
        captured.setattr(non_finite, "weight_amaxes", lambda weights: pytest.fail("weights are looked at"))
        assert [error_of(model) for _ in range(2)] == ["", ""]
    assert "layers.1 (" in error_of(model)
