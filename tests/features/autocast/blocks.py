"""A block of converted layers, what it computes inside recipe contexts, and whether two runs agree to the bit."""

import pytest
import torch
from torch import nn

import f8sub
from tests.layers import K, M, N, dy_of, x_of
from tests.models import seed_weights

RECIPES = f8sub.recipe_names()
OWN, OTHER = "tensorwise", "rowwise"
on_each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=RECIPES)

Results = list[torch.Tensor]


class Block(nn.Module):
    """Siblings that share one x, then a layer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(K, N), nn.Linear(K, N), nn.Linear(N, K)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.sigmoid(self.gate(x)) * self.up(x))


def block(recipe: str | f8sub.Recipe | None = OWN) -> nn.Module:
    model = seed_weights(Block())
    return model if recipe is None else f8sub.convert_to_float8(model, recipe=recipe)


def results(model: nn.Module, run=lambda model, x: model(x), around=None) -> Results:
    """y, dx and every gradient of ``run``; backward outside of any context, or inside ``around``."""
    model.zero_grad()
    x = x_of(M, K)
    y = run(model, x)
    if around is None:
        y.backward(dy_of(y))
    else:
        with around:
            y.backward(dy_of(y))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def same(found: Results, expected: Results) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def under(*contexts: f8sub.autocast):
    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not contexts:
            return model(x)
        with contexts[0]:
            return under(*contexts[1:])(model, x)

    return run
