"""One converted layer, or a block of them, what it is called with, and its gradients."""

import contextlib

import pytest
import torch
from torch import nn

import f8sub
from tests import oracle
from tests.data_sets import gaussian, generator
from tests.models import seed_weights

K, N, M = 32, 48, 24
RECIPES = f8sub.recipe_names()
OWN, OTHER = "tensorwise", "rowwise"
"""The recipe of a layer and that of a context."""
on_each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=RECIPES)


def made(recipe: str = "tensorwise", dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    model = seed_weights(nn.Sequential(nn.Linear(K, N, bias=bias)))
    return f8sub.convert_to_float8(model.to(dtype), recipe=recipe)[0]


def x_of(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return gaussian(shape, generator(seed)).to(dtype).requires_grad_()


def dy_of(y: torch.Tensor, seed: int = 2) -> torch.Tensor:
    return gaussian(tuple(y.shape), generator(seed)).to(y.dtype)


def gradients(layer: nn.Linear, x: torch.Tensor) -> dict[str, torch.Tensor]:
    y = layer(x)
    y.backward(dy_of(y))
    found = {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad}
    if layer.bias is not None:
        found["db"] = layer.bias.grad
    return found


def in_float8(recipe: str) -> dict[str, bool]:
    """Whether the GEMM that makes y, dx, dw runs in float8; the bias gradient never does."""
    specs = f8sub.get_recipe(recipe)
    gemms = {"y": specs.fprop, "dx": specs.dgrad, "dw": specs.wgrad}
    return {name: spec.a is not None for name, spec in gemms.items()} | {"db": False}


def assert_close(found: torch.Tensor, expected: torch.Tensor, recipe: str = "tensorwise") -> None:
    """Within what its codes cost: a guard against wrong results, not a budget (the contract tests have those)."""
    found, expected = found.detach().float(), expected.detach().float()
    share = 0.2 if oracle.spec_of(recipe, "x").format == "e2m1" else 0.1
    assert (found - expected).norm() <= share * expected.norm()


class Block(nn.Module):
    """Siblings that share one x, then a layer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(K, N), nn.Linear(K, N), nn.Linear(N, K)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.sigmoid(self.gate(x)) * self.up(x))


def block(recipe: str | f8sub.Recipe | None = "tensorwise") -> nn.Module:
    model = seed_weights(Block())
    return model if recipe is None else f8sub.convert_to_float8(model, recipe=recipe)


def results(model: nn.Module, run=lambda model, x: model(x), around=None) -> list[torch.Tensor]:
    """y, dx and every gradient of ``run``; backward outside of any context, or inside ``around``."""
    model.zero_grad()
    x = x_of(M, K)
    y = run(model, x)
    with around or contextlib.nullcontext():
        y.backward(dy_of(y))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def under(*contexts: f8sub.autocast):
    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not contexts:
            return model(x)
        with contexts[0]:
            return under(*contexts[1:])(model, x)

    return run
