"""What the conversion tests convert, and how they look at the result."""

import torch
from torch import nn

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import seed_weights

K, N = 32, 48


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(K, N), nn.Linear(N, K)
        self.lm_head = nn.Linear(K, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.down(torch.relu(self.up(x))))


def mlp() -> Mlp:
    return seed_weights(Mlp())


def x_of(*shape: int) -> torch.Tensor:
    return gaussian(shape or (8, K), generator(1))


def reasons(model: nn.Module) -> dict[str, str]:
    """Why each layer of a model is not converted."""
    return {la.fqn: la.detail for la in f8sub.conversion_report(model).layers if not la.converted}


def converted(model: nn.Module) -> list[str]:
    return [la.fqn for la in f8sub.conversion_report(model).layers if la.converted]
