"""A compiled write bypasses dispatch; the weight's next codes are of what it wrote."""

import pytest
import torch
from torch import nn

import f8sub
from tests.data_sets import gaussian, generator


def decibels(layer: nn.Module, x: torch.Tensor) -> float:
    exact = x.double() @ layer.weight.detach().double().t()
    return 10 * torch.log10(exact.square().sum() / (exact - layer(x)).square().sum()).item()


def trained() -> tuple[nn.Module, torch.Tensor]:
    layer = f8sub.convert_to_float8(nn.Linear(64, 48, bias=False))
    x = gaussian((16, 64), generator(1))
    layer(x).backward(gaussian((16, 48), generator(2)))
    return layer, x


@pytest.mark.parametrize(
    "options", [{}, {"foreach": True}, {"foreach": False}], ids=["default", "foreach", "loop"]
)
def test_a_compiled_optimizer_step(options):
    torch._dynamo.reset()
    layer, x = trained()
    step = torch.compile(torch.optim.AdamW(layer.parameters(), lr=2.0, **options).step, backend="aot_eager")
    for _ in range(2):
        step()
        assert decibels(layer, x) > 25


def test_a_compiled_function():
    torch._dynamo.reset()
    layer, x = trained()

    @torch.compile(backend="aot_eager")
    def grow(weight: torch.Tensor) -> None:
        with torch.no_grad():
            weight.mul_(50.0)

    grow(layer.weight)
    assert decibels(layer, x) > 25
