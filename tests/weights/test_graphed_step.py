"""A whole training step as one CUDA graph, of weights that are not sharded: it trains as launched steps do."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import f8sub
from f8sub.features.delayed import histories
from f8sub.linear import weight_cast
from f8sub.weights import master_weight
from tests.data_sets import gaussian, generator
from tests.models import transformer
from tests.op_recorder import OpRecorder

RECIPES = ("rowwise", "blockwise", "gridquant", "mxfp8", "nvfp4")
"""Without delayed scaling; tensorwise reads amaxes on the host, on CPUs."""

STEPS = 4


class Training:
    """A model in bfloat16, AdamW, and memory that each step's batch is copied to."""

    def __init__(self, recipe: str) -> None:
        self.model = transformer(recipe, spread=2.0).bfloat16()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, fused=True, capturable=True)
        self.x, self.target = torch.zeros(8, 4, 32, dtype=torch.bfloat16), torch.zeros(32, dtype=torch.int64)

    def feed(self, step: int) -> None:
        rng = generator(step)
        self.x.copy_(gaussian(tuple(self.x.shape), rng))
        self.target.copy_(torch.randint(11, (32,), generator=rng))

    def step(self) -> torch.Tensor:
        loss = F.cross_entropy(self.model(self.x).flatten(0, 1).float(), self.target)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        f8sub.precompute_scales(self.model)
        return loss.detach()

    def launched(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            self.feed(step)
            losses.append(self.step().item())
        return losses


@contextlib.contextmanager
def capture() -> Iterator[OpRecorder]:
    with pytest.MonkeyPatch.context() as monkeypatch, OpRecorder() as graph:
        for module in (master_weight, weight_cast):
            monkeypatch.setattr(module, "is_capturing", lambda tensor: True)
        yield graph


@pytest.mark.parametrize("recipe", RECIPES, ids=RECIPES)
def test_replays_have_the_losses_of_launched_steps(recipe):
    expected = Training(recipe).launched(range(2 + STEPS))
    training = Training(recipe)
    losses = training.launched(range(1))
    training.feed(1)
    with capture() as graph:
        loss = training.step()
    losses.append(loss.item())  # what the recorder records runs, too
    for step in range(2, 2 + STEPS):
        training.feed(step)
        graph.replay()
        losses.append(loss.item())
    assert losses == expected


def test_histories_do_not_roll_in_a_graph(monkeypatch):
    training = Training("delayed")
    training.launched(range(2))
    y = training.model(training.x)
    y.backward(gaussian(tuple(y.shape), generator(9)).bfloat16())
    monkeypatch.setattr(histories, "is_capturing", lambda tensor: True)
    with pytest.raises(f8sub.Float8ConfigError, match="capture forward and backward alone"):
        training.optimizer.step()
