"""Every optimizer that trains the plain FSDP2 model trains it in float8: the same bits with the float8 all-gather as
without it, which reads the weights anew at every forward."""

import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import Stack, precompute, seed_weights, shard

RECIPES = ("tensorwise", "delayed")
"""How a write is noticed does not depend on the recipe (contract/ranks/test_weights.py), how a history rolls does."""
STEPS = 3
WIDTHS = (64, 128, 64)
"""Two ranks hold 4096 elements of each weight, from which on torchao's optimizers have states of fewer bits."""

Implementation = dict[str, Any]
OF_TORCH = sorted(name for name in torch.optim.__all__ if name[0].isupper() and name != "Optimizer")
OF_TORCHAO = ["torchao.AdamW8bit", "torchao.AdamW4bit", "torchao.AdamWFp8"]


def implementations(name: str) -> list[Implementation]:
    """A loop over the parameters, foreach and fused, where torch has the choice."""
    choices = inspect.signature(getattr(torch.optim, name)).parameters
    found = [{"foreach": False}, {"foreach": True}] if "foreach" in choices else [{}]
    return [*found, {"fused": True}] if "fused" in choices else found


CASES = [(name, options) for name in OF_TORCH for options in implementations(name)]
CASES += [(name, {}) for name in OF_TORCHAO]
ONE_OF_EACH_KIND = [
    ("SGD", {"foreach": False}),
    ("AdamW", {"foreach": True}),
    ("AdamW", {"fused": True}),
    ("LBFGS", {}),
    ("torchao.AdamW8bit", {}),
]
LEARNING_RATE = {"Adadelta": 1.0, "SGD": 1.0, "LBFGS": 0.1}
FEWER_RUNS: Implementation = {"max_iter": 4}
"""Of LBFGS, which runs the model up to 20 times a step."""


def class_of(name: str) -> type[torch.optim.Optimizer]:
    if name.startswith("torchao."):
        return getattr(importlib.import_module("torchao.optim"), name.removeprefix("torchao."))
    return getattr(torch.optim, name)


def model_of(recipe: str | None, all_gather: bool) -> nn.Module:
    model = seed_weights(Stack(*WIDTHS), 2.0)
    if recipe is not None:
        f8sub.convert_to_float8(model, recipe=recipe, float8_all_gather=all_gather)
    return shard(model)


def train(model: nn.Module, make: Callable[..., torch.optim.Optimizer], rank: int) -> list[float]:
    optimizer = make(model.parameters())
    x, target = gaussian((16, WIDTHS[0]), generator(rank)), gaussian((16, WIDTHS[-1]), generator(9 + rank))
    losses: list[float] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    precompute(model)
    for _ in range(STEPS):
        if isinstance(optimizer, torch.optim.LBFGS):
            with warnings.catch_warnings():
                # It runs the model between the changes of one step.
                warnings.simplefilter("ignore", f8sub.Float8Warning)
                optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        precompute(model)
    closure()
    return losses


def on_and_off(rank: int, world: int, name: str, options: Implementation, compiled: bool) -> tuple[str, dict]:
    """Why the plain model cannot be trained so, or losses of each recipe with and without the float8 all-gather."""

    more = FEWER_RUNS if name == "LBFGS" else {}

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = class_of(name)(parameters, lr=LEARNING_RATE.get(name, 1e-2), **options, **more)
        torch._dynamo.reset()  # each optimizer is compiled anew, and dynamo gives up after a few
        if compiled and not name.startswith("torchao."):
            optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
        return optimizer

    if not compiled:
        torch.compiler.set_stance("force_eager")  # torchao's compile themselves
    try:
        train(model_of(None, False), make, rank)
    except Exception as error:
        return f"torch cannot, on the plain model: {type(error).__name__}: {str(error)[:200]}", {}
    return "", {
        recipe: [train(model_of(recipe, all_gather), make, rank) for all_gather in (True, False)]
        for recipe in RECIPES
    }


def case(name: str, options: Implementation, compiled: bool) -> Any:
    """A parameter of the test, with a readable name."""
    words = [name, *(f"{option}={value}" for option, value in options.items()), *["compiled"] * compiled]
    quick = (name, options) in ONE_OF_EACH_KIND and not compiled
    marks = () if quick else pytest.mark.long
    return pytest.param(name, options, compiled, id="-".join(words), marks=marks)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "options", "compiled"),
    [
        *(case(name, options, False) for name, options in CASES),
        *(case(name, {}, True) for name in ("AdamW", "LBFGS", "torchao.AdamW8bit")),
    ],
)
def test_on_is_off(ranks, name, options, compiled):
    """Compiled steps write to the weights where no operator shows it."""
    results = ranks(2, on_and_off, name, options, compiled)
    if reason := results[0][0]:
        pytest.skip(reason)
    for _, losses in results:
        assert set(losses) == set(RECIPES)
        for recipe, (on, off) in losses.items():
            assert on == off, recipe
            assert len(set(on)) == len(on), recipe
