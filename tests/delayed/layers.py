"""One layer with delayed scaling: its state, its data, its steps."""

import pytest
import torch
from torch import nn

import f8sub
from f8sub.delayed.state import ScalingState
from tests.data_sets import gaussian, generator
from tests.models import seed_weights, update

K, N, M = 32, 48, 16
FORMAT = {"x": "e4m3", "w": "e4m3", "dy": "e5m2"}
BAD = {"nan": float("nan"), "inf": float("inf"), "minus_inf": float("-inf")}
on_each_bad_value = pytest.mark.parametrize("bad", BAD.values(), ids=list(BAD))


def layer_of(**options) -> f8sub.Float8Linear:
    recipe = f8sub.get_recipe("delayed", **options)
    return f8sub.convert_to_float8(seed_weights(nn.Sequential(nn.Linear(K, N))), recipe=recipe)[0]


def state_of(layer: nn.Module) -> ScalingState:
    (state,) = layer.scaling_states
    return state


def history_of(layer: nn.Module) -> torch.Tensor:
    """(amax_history_len, 3): of x, w, dy."""
    return torch.stack(state_of(layer).histories, 1)


def data(seed: int, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = generator(seed)
    return (size * gaussian((M, K), rng)).requires_grad_(), size * gaussian((M, N), rng)


def run(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    y = layer(x)
    y.backward(dy)
    return y.detach()


def optimizer_of(layer: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(layer.parameters(), lr=1e-2)


def step(layer: nn.Module, optimizer: torch.optim.Optimizer, seed: int, size: float = 1.0) -> None:
    run(layer, *data(seed, size))
    update(layer, optimizer)


def snapshot(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in layer.named_buffers()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(K, N), nn.Linear(K, N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) + self.k(x)


def siblings(**options) -> nn.Module:
    return f8sub.convert_to_float8(seed_weights(Siblings()), recipe=f8sub.get_recipe("delayed", **options))
