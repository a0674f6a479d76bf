"""Models on meta and under FakeTensorMode, as memory estimators run them: they train, and leave nothing behind."""

from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import seed_weights

RECIPES = f8sub.recipe_names()
MODES = {"fake": FakeTensorMode, "meta": lambda: torch.device("meta")}


def converted(recipe: str) -> nn.Module:
    return f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)), recipe=recipe)


def steps(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The output of the last of three steps: delayed scaling has histories then, and what it waits for is there."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        y = model(x)
        y.backward(torch.ones_like(y))
        optimizer.step()
        optimizer.zero_grad()
    return y.detach()


def in_mode(recipe: str, mode: AbstractContextManager[object]) -> str:
    with mode:
        y = steps(converted(recipe), torch.randn(16, 64))
    return f"{type(y).__name__} of {tuple(y.shape)} on {y.device.type}"


def run(rank: int, world: int) -> tuple[dict[str, list[str]], dict[str, list[float]]]:
    """Rank 0 runs in the modes first, then both ranks run models of real tensors."""
    said = {r: [in_mode(r, mode()) for mode in MODES.values()] for r in RECIPES if rank == 0}
    real = {r: steps(seed_weights(converted(r)), gaussian((16, 64), generator(1))) for r in RECIPES}
    return said, {recipe: y.flatten().tolist() for recipe, y in real.items()}


def test_a_run_in_a_mode_trains_and_changes_no_later_run(ranks):
    (said, found), (_, expected) = ranks(2, run)
    assert said == {r: ["FakeTensor of (16, 64) on cpu", "Tensor of (16, 64) on meta"] for r in RECIPES}
    assert [recipe for recipe in RECIPES if found[recipe] != expected[recipe]] == []


@pytest.mark.parametrize("recipe", ["rowwise", "nvfp4"], ids=str)
def test_codes_that_a_mode_made_of_a_real_weight_are_not_kept(recipe):
    model, x = seed_weights(converted(recipe)), gaussian((16, 64), generator(1))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(x)
    assert torch.equal(model(x), seed_weights(converted(recipe))(x))
