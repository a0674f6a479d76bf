"""Weights of converted modules that something else makes: parametrizations, norms, pruning."""

import copy
import io
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import f8sub
from tests.data_sets import gaussian, generator
from tests.experts.models import OwnExperts
from tests.layers import K, M, N
from tests.models import refusal, seed_weights

ENDS = torch.tensor([6, 6, 20, M])
f8sub.register_experts(OwnExperts)


class Half(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w * 0.5


class HalfOfDouble(Half):
    def right_inverse(self, w: torch.Tensor) -> torch.Tensor:
        return w * 2


WAYS: dict[str, Callable[[nn.Module, str], object]] = {
    "parametrization": lambda module, name: parametrize.register_parametrization(module, name, Half()),
    "right inverse": lambda module, name: parametrize.register_parametrization(module, name, HalfOfDouble()),
    "weight norm": lambda module, name: parametrizations.weight_norm(module, name),
    "spectral norm": lambda module, name: parametrizations.spectral_norm(module, name),
    "orthogonal": lambda module, name: parametrizations.orthogonal(module, name),
    "old weight norm": lambda module, name: weight_norm(module, name),
    "old spectral norm": lambda module, name: spectral_norm(module, name),
    "pruning": lambda module, name: prune.l1_unstructured(module, name, 0.3),
}
on_each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
on_both_kinds = pytest.mark.parametrize("kind", ["linear", "experts"])


def model_of(kind: str, recipe: str | None = "rowwise") -> nn.Module:
    model = nn.Sequential(seed_weights(nn.Linear(K, N)) if kind == "linear" else OwnExperts(4, K, N))
    return model if recipe is None else f8sub.convert_to_float8(model, recipe, experts=True)


def weight_of(model: nn.Module) -> str:
    return "weight" if isinstance(model[0], nn.Linear) else "gate"


def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x) if isinstance(model[0], nn.Linear) else model[0](x, ENDS)


def x_of(seed: int = 1) -> torch.Tensor:
    return gaussian((M, K), generator(seed)).requires_grad_()


def trained(model: nn.Module) -> list[torch.Tensor]:
    """A step's result and gradients, and the result after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    x = x_of()
    y = call(model, x)
    y.backward(gaussian(tuple(y.shape), generator(2)))
    found = [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
    optimizer.step()
    f8sub.precompute_scales(model) if hasattr(model[0], "_f8sub") else None
    return [*found, call(model, x).detach()]


@on_each_way
@on_both_kinds
def test_while_a_graph_is_alive(kind, way):
    """Such as that of a loss that is still there. The numbers are high precision's, but for what codes round."""
    found = []
    for recipe in (None, "rowwise"):
        model = model_of(kind, recipe)
        alive = call(model, x_of(3))
        torch.manual_seed(0)
        way(model[0], weight_of(model))
        found.append((list(model.state_dict()), trained(model)))
        del alive
    (plain_names, plain), (names, float8) = found
    assert names == plain_names
    for a, b in zip(float8, plain, strict=True):
        assert (a - b).norm() <= 0.15 * b.norm()


def test_backward_of_the_graph_from_before():
    """Torch's error, as for plain layers."""
    for recipe, parametrization in itertools.product((None, "rowwise"), (Half(), HalfOfDouble())):
        model = model_of("linear", recipe)
        y = call(model, x_of(3))
        parametrize.register_parametrization(model[0], "weight", parametrization)
        message = refusal(RuntimeError, y.backward, gaussian((M, N), generator(4)))
        assert "modified by an inplace operation" in message


@on_each_way
@on_both_kinds
def test_state_dicts_reports_and_copies(kind, way):
    model, plain = model_of(kind), model_of(kind, None)
    for each in (model, plain):
        torch.manual_seed(0)
        way(each[0], weight_of(each))
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert list(saved) == list(plain.state_dict())
    before = call(model, x_of()).detach()
    trained(model)
    model.load_state_dict(saved)
    with torch.no_grad():
        model[0].eval()  # spectral norm takes another step in training
        assert call(model, x_of()).shape == before.shape
    assert "in float8" in str(f8sub.conversion_report(model))
    if "parametrizations" in model[0]._modules:
        copied = copy.deepcopy(model)
        assert torch.equal(call(copied, x_of()), call(model, x_of()))
        assert "only supported through state_dict" in refusal(
            RuntimeError, torch.save, model[0], io.BytesIO()
        )
        message = refusal(f8sub.Float8ConfigError, f8sub.convert_from_float8, model)
        assert message.startswith("0: convert_from_float8 cannot give back the class")
        parametrize.remove_parametrizations(model[0], weight_of(model))
    f8sub.convert_from_float8(model)
    assert type(model[0]) in (nn.Linear, OwnExperts)
    assert not any("MasterWeight" in type(parameter).__name__ for parameter in model.parameters())
    call(model, x_of())


@on_both_kinds
def test_to_another_dtype_while_a_graph_is_alive(kind):
    model = model_of(kind)
    alive = call(model, x_of())
    model.to(torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    expected = model_of(kind).to(torch.bfloat16)
    x = x_of().detach().bfloat16()
    assert torch.equal(call(model, x), call(expected, x))
    assert alive.dtype == torch.float32


@pytest.mark.parametrize("first", [True, False])
def test_a_report_counts_a_parametrized_weight_once(first):
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64))
    if first:
        parametrizations.weight_norm(model[0])
    f8sub.convert_to_float8(model)
    if not first:
        parametrizations.weight_norm(model[0])
    report = f8sub.conversion_report(model)
    assert report.flops_share == (0.5 if first else 1.0)
    assert report.not_counted_share == 0
    assert "parametrizations" not in str(report)
