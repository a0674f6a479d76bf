"""Sensitivity changes nothing of the model, and finds the layer that float8 breaks."""

import pytest
import torch

import f8sub
from tests.models import loss_of, transformer


def loss(model: torch.nn.Module) -> torch.Tensor:
    return loss_of(model, 0, 0)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "delayed", "rowwise_with_gw_hp"])
def test_nothing_of_the_model_changes(recipe):
    model = transformer(recipe)
    loss(model).backward()
    before = {n: (p.detach().clone(), p.grad.clone()) for n, p in model.named_parameters()}
    plans = [m._f8sub.plan for m in model.modules() if isinstance(m, f8sub.Float8Linear)]
    expected = loss(model).item()
    found = f8sub.sensitivity(model, loss)
    assert loss(model).item() == expected
    assert plans == [m._f8sub.plan for m in model.modules() if isinstance(m, f8sub.Float8Linear)]
    assert all(
        torch.equal(p, before[n][0]) and torch.equal(p.grad, before[n][1])
        for n, p in model.named_parameters()
    )
    assert not any(m._forward_hooks for m in model.modules() if isinstance(m, f8sub.Float8Linear))
    assert len(found.layers) == 14
    assert sum(layer.flops for layer in found.layers) == pytest.approx(1.0)
    assert found.loss == pytest.approx(expected, rel=0.05)


def test_harm_is_the_first_order_change_of_the_loss():
    """Against the products themselves, in float64, of one layer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 48, bias=False))
    weight = model[0].weight.detach().clone()
    f8sub.convert_to_float8(model, recipe="rowwise")
    x, target = torch.randn(16, 32), torch.randn(16, 48)
    found = f8sub.sensitivity(model, lambda model: (model(x) * target).sum())
    x8, w8 = (
        f8sub.quantize(t, "rowwise", o, columnwise=False).dequantize() for t, o in ((x, "x"), (weight, "w"))
    )
    error = x8.double() @ w8.double().t() - x.double() @ weight.double().t()
    assert found.layers[0].harm == pytest.approx(
        (error * target.double()).square().sum().sqrt().item(), rel=1e-4
    )
    assert found.skip(1.0) == ["0"]
    assert found.skip(0.5) == []
    ninths = type(found)((found.layers[0]._replace(flops=1 / 9),) * 9, found.loss)
    assert len(ninths.skip(1.0)) == 9


def test_frozen_layers_are_looked_at_as_well_and_stay_frozen():
    model = transformer("tensorwise")
    expected = f8sub.sensitivity(model, loss)
    model.requires_grad_(False)
    assert f8sub.sensitivity(model, loss) == expected
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())


def test_a_layer_with_outliers_is_the_first():
    model = transformer("tensorwise")
    with torch.no_grad():
        model.blocks[1].gate.weight[3] *= 1e5  # the other rows are rounded to nothing
        model.blocks[1].gate.bias[3] = -1e9  # and this one reaches no loss
    found = f8sub.sensitivity(model, loss)
    assert found.layers[0].fqn == "blocks.1.gate"
    assert str(found).splitlines()[1].startswith("blocks.1.gate")
    assert found.skip(found.layers[0].flops) == ["blocks.1.gate"]


def test_what_is_no_loss():
    model = f8sub.convert_to_float8(torch.nn.Sequential(torch.nn.Linear(64, 64)))
    nan = torch.tensor(torch.nan, requires_grad=True)
    for loss, words in ((torch.ones(3), r"ed \(3,\)"), (1.0, "returned float"), (nan, "the loss is nan")):
        with pytest.raises((f8sub.Float8ConfigError, f8sub.Float8NumericsError), match=words):
            f8sub.sensitivity(model, lambda _, loss=loss: loss)
    with pytest.raises(f8sub.Float8NumericsError, match="0: float8's error, or the gradient"):
        f8sub.sensitivity(model, lambda model: (0 * model(torch.ones(16, 64))).sum().sqrt())


def test_what_cannot_be_looked_at():
    with pytest.raises(f8sub.Float8ConfigError, match="no float8 layer"):
        f8sub.sensitivity(torch.nn.Linear(4, 4), lambda model: model(torch.ones(1, 4)).sum())
    model = transformer("tensorwise")
    with pytest.raises(f8sub.Float8ConfigError, match=r"blocks\.1\.\w+, .*not run by loss_of"):
        f8sub.sensitivity(model, lambda model: model.blocks[0](torch.randn(2, 4, 32)).square().sum())
    dropped = f8sub.convert_to_float8(transformer(None), primary_weights=True).requires_grad_(False)
    f8sub.drop_high_precision(dropped)
    with pytest.raises(f8sub.Float8ConfigError, match="values were dropped"):
        f8sub.sensitivity(dropped, loss)
    with torch.no_grad(), pytest.raises(f8sub.Float8ConfigError, match="the loss has no gradient"):
        f8sub.sensitivity(model, loss)


@pytest.mark.parametrize("flops", [5, -0.1, "x"])
def test_a_share_is_no_number_of_percent(flops):
    found = f8sub.sensitivity(transformer("tensorwise"), loss)
    with pytest.raises(f8sub.Float8ConfigError, match=rf"0\.05 for 5 %, got {flops!r}"):
        found.skip(flops)
