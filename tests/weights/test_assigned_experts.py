"""``load_state_dict(assign=True)`` of experts: they keep the weight that an optimizer has, as linear layers do."""

import pytest
import torch
from torch import nn

import f8sub
from tests.data_sets import gaussian, generator


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(gaussian((3, 48, 32), generator(1)) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return f8sub.grouped_linear(x, self.up, torch.tensor([4, 4, len(x)]))


f8sub.register_experts(Experts)


def made(primary: bool) -> nn.Module:
    return f8sub.convert_to_float8(
        nn.Sequential(nn.Linear(32, 32, bias=False), Experts()),
        "tensorwise",
        experts=True,
        skip_defaults=False,
        primary_weights=primary,
    )


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    results = []
    for seed in range(2):
        y = model(gaussian((16, 32), generator(seed)))
        y.backward(gaussian((16, 48), generator(seed + 5)))
        optimizer.step()
        optimizer.zero_grad()
        results.append(y.detach())
    return results


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("primary", [True, False])
def test_they_train_on_from_what_was_loaded(primary, assign):
    model, expected = made(primary), made(primary=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if primary:
        optimizer = f8sub.optim.MasterWeights(optimizer)
    loaded = {
        name: gaussian(tuple(value.shape), generator(9)) / 8 for name, value in model.state_dict().items()
    }
    weight = model[1].up
    model.load_state_dict({name: value.clone() for name, value in loaded.items()}, assign=assign)
    if primary or not assign:
        assert model[1].up is weight
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected.load_state_dict(loaded)
    found = trained(model, optimizer)
    assert all(map(torch.equal, found, trained(expected, torch.optim.SGD(expected.parameters(), lr=0.1))))
