"""What reports, estimates and tools say of weights that something else makes, and that looking at them changes nothing.

Parametrizations, norms and pruning, of linear layers and of experts, before a conversion and after it.
"""

import pytest
import torch
from torch import nn

import f8sub
from f8sub.estimator.estimate import shapes_of
from f8sub.weights.weight import parameters_of
from tests.convert.test_parametrized import ENDS, WAYS, model_of, on_both_kinds, weight_of, x_of
from tests.data_sets import gaussian, generator
from tests.layers import K, M, N

on_each = pytest.mark.parametrize("way", WAYS)

HIDDEN = {"linear": M * K * N, "experts": 3 * M * K * N}
"""Multiplications of the tokens by the weights of the changed module."""

WITH_PRODUCTS = {"spectral norm", "orthogonal", "old spectral norm"}
"""Ways that multiply by the weight to compute it."""


class Net(nn.Module):
    """A plain layer, and a module whose weight is made."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.changed = nn.Linear(K, K), model_of(kind, None)[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.changed(h) if isinstance(self.changed, nn.Linear) else self.changed(h, ENDS)


def changed(kind: str, way: str, *, converted: str = "after") -> Net:
    """A net that was changed ``way`` and converted "before" that, "after" it, or never."""
    torch.manual_seed(0)
    net = Net(kind)
    name = weight_of([net.changed])
    steps = [lambda: WAYS[way](net.changed, name)]
    if converted != "never":
        steps.insert(
            0 if converted == "before" else 1,
            lambda: f8sub.convert_to_float8(net, "rowwise", experts=True, skip_defaults=False),
        )
    for apply in steps:
        apply()
    return net


@on_each
@pytest.mark.parametrize("converted", ["before", "after"])
@on_both_kinds
def test_counted(kind, converted, way):
    """Of a weight that was made before the conversion the layer stays in high precision, as the report says."""
    net = changed(kind, way, converted=converted)
    report = f8sub.conversion_report(net, batch=x_of().detach(), tokens=M)
    in_float8 = HIDDEN[kind] if converted == "before" else 0
    made = sum(other.multiplications for other in report.others if "parametrizations" in other.fqn)
    if kind == "linear":
        (layer,) = (layer for layer in report.layers if layer.fqn == "changed")
        assert (layer.in_float8, layer.read_by, layer.runs) == (in_float8, "", 1)
    else:
        (layer,) = (other for other in report.others if other.fqn == "changed")
        assert layer.in_float8 == in_float8
    made += layer.multiplications - HIDDEN[kind]
    assert (made > 0) == (way in WITH_PRODUCTS)
    total = M * K * K + HIDDEN[kind] + made
    assert report.flops_share == pytest.approx((M * K * K + in_float8) / total)
    assert ("is parametrized" in " ".join(str(report).split())) == (converted == "after")
    assert "register_experts" not in report.summary
    assert report.bytes is not None


@on_each
@pytest.mark.parametrize("converted", ["never", "before", "after"])
@on_both_kinds
def test_estimated(kind, converted, way):
    """A weight that learns is not frozen, whatever was computed from it so far; nothing else is a product."""
    net = changed(kind, way, converted=converted)
    shapes = shapes_of(net)
    names = ["changed"] if kind == "linear" else [f"changed.{name}" for name in ("down", "gate", "up")]
    assert sorted(product.fqn for product in shapes.products) == [*names, "first"]
    assert not any(product.frozen for product in shapes.products)
    with torch.no_grad():
        # What a forward in evaluation leaves.
        for hook in net.changed._forward_pre_hooks.values():
            hook(net.changed, ())
    assert not any(product.frozen for product in shapes_of(net).products)
    saved = f8sub.conversion_report(net, tokens=M).bytes
    for parameter in net.changed.parameters():
        parameter.requires_grad_(False)
    assert [product.frozen for product in shapes_of(net).products if product.fqn in names] == [True] * len(
        names
    )
    assert str(f8sub.conversion_report(net, tokens=M).bytes) != str(saved)
    report = f8sub.conversion_report(net)
    assert not [name for name in report.not_counted if "changed" in name]


TOOLS = {
    "report": lambda net: f8sub.conversion_report(net, tokens=M),
    "count": lambda net: f8sub.conversion_report(net, batch=x_of().detach()),
    "estimate": lambda net: f8sub.estimate(net, tokens=128, sequence=128),
    "repr": repr,
}
BESIDE = {
    "Monitor": lambda net: f8sub.Monitor(net, every=1),
    "find_nonfinite": f8sub.find_nonfinite,
}


def step(net: nn.Module) -> torch.Tensor:
    y = net(x_of())
    y.backward(gaussian((M, y.shape[-1]), generator(2)))
    return y.detach()


@on_each
@on_both_kinds
def test_looking_changes_nothing(kind, way):
    """Spectral norm takes a step of its own whenever its weight is computed in training."""
    expected = changed(kind, way, converted="before")
    y = step(expected)
    for tool in (*TOOLS, *BESIDE):
        net = changed(kind, way, converted="before")
        if tool in TOOLS:
            TOOLS[tool](net)
            assert torch.equal(step(net), y), tool
        else:
            with BESIDE[tool](net):
                assert torch.equal(step(net), y), tool
        for a, b in zip(net.state_dict().values(), expected.state_dict().values(), strict=True):
            assert torch.equal(a, b), tool
        for a, b in zip(net.parameters(), expected.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad), tool


@on_each
@on_both_kinds
def test_nan_is_found(kind, way):
    """In the dy of each product, and in the weight."""
    net = changed(kind, way, converted="before")
    of = "changed" if kind == "linear" else "changed.gate"
    with f8sub.find_nonfinite(net) as search:
        y = net(x_of())
        y.backward(torch.full_like(y, torch.nan))
    last = "changed" if kind == "linear" else "changed.down"
    assert (search.first.layer, search.first.role) == (last, "dy")
    with torch.no_grad():
        for parameter in parameters_of(net.changed, weight_of([net.changed])):
            parameter[..., 0] = torch.nan
    with f8sub.find_nonfinite(net) as search:
        net(x_of())
    assert (search.first.layer, search.first.role) == (of, "w")


@on_each
@on_both_kinds
def test_monitor_and_sensitivity(kind, way):
    net = changed(kind, way, converted="before")
    monitor = f8sub.Monitor(net, every=1)
    with monitor:
        step(net)
    monitor.flush()
    of = "changed" if kind == "linear" else "changed.gate"
    assert {row.role for row in monitor.rows if row.layer == of} == {"x", "w", "dy"}
    ranked = f8sub.sensitivity(net, lambda net: net(x_of()).square().mean())
    assert {layer.fqn for layer in ranked.layers} == {"first", "changed"}
