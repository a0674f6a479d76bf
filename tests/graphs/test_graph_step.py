"""graph_step on a CPU, by an imitation of graphs: replays are launched steps. tests/cuda has real graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import f8sub
from tests.data_sets import gaussian, generator
from tests.graphs.tape import imitate
from tests.layers import RECIPES
from tests.models import BF16, shard, transformer

STEPS = 8


@pytest.fixture
def imitated(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate(monkeypatch)


def batch_of(step: int, rank: int = 0, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    rng = generator(10 * step + rank)
    return gaussian((size, 4, 32), rng), torch.randint(11, (4 * size,), generator=rng)


def forward_backward_of(model: nn.Module, clip: float | None = 1.0) -> Callable[..., torch.Tensor]:
    def forward_backward(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1).float(), target)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        return loss

    return forward_backward


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 3e-3, "fused": True, **options})


def trained(
    recipe: str | None, steps: int = STEPS, *, between: Callable[..., None] | None = None, **options: Any
) -> tuple[list[float], nn.Module, Any]:
    """Losses of so many steps, the model, and the step; ``between`` is called after each."""
    model = transformer(recipe, spread=2.0)
    optimizer = adamw(model)
    step = f8sub.graph_step(forward_backward_of(model), model, optimizer, **options)
    losses = []
    for index in range(steps):
        losses.append(step(*batch_of(index)).item())
        if between is not None:
            between(index, model, optimizer)
    return losses, model, step


def both(monkeypatch: pytest.MonkeyPatch, recipe: str | None, **how: Any) -> Any:
    """Launched losses and weights are those of replays; the last step."""
    launched, twin, _ = trained(recipe, **how)
    with monkeypatch.context() as patch:
        imitate(patch)
        replayed, model, step = trained(recipe, **how)
    assert launched[-1] != launched[0]
    assert replayed == launched
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
    return step


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_losses_and_weights_are_those_of_launched_steps(monkeypatch, recipe):
    step = both(monkeypatch, recipe)
    assert (step.how, step.why_launched) == ("replayed", None)


def sharded(
    rank: int, world: int, recipe: str | None, gradients: bool
) -> tuple[list[float], list[float], list[str]]:
    def train(imitated: bool) -> tuple[list[float], list[str]]:
        with pytest.MonkeyPatch.context() as patch:
            model = shard(transformer(recipe, spread=2.0), BF16)
            if gradients:
                f8sub.reduce_gradients_in_float8(model)
            if imitated:
                imitate(patch)
            step = f8sub.graph_step(forward_backward_of(model), model, adamw(model))
            found, how = [], []
            for index in range(STEPS):
                found.append(step(*batch_of(index, rank)).item())
                how.append(step.how)
            return found, how

    launched, replayed = train(False), train(True)
    return launched[0], *replayed


@pytest.mark.parametrize("gradients", [False, True], ids=["", "float8-gradients"])
@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_of_sharded_weights_too(ranks, world, recipe, gradients):
    for launched, replayed, how in ranks(world, sharded, recipe, gradients):
        assert how == ["launched"] * 3 + ["captured"] + ["replayed"] * (STEPS - 4)
        assert launched[-1] != launched[0]
        assert replayed == launched
