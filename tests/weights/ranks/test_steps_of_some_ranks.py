"""A rank leaves out what the others do, as where its own loss is NaN: training goes on, as it does in high precision.

What is expected is the same training with ``float8_all_gather=False``, in which FSDP2 gathers and f8sub does nothing
together: the same bits, whoever stepped.
"""

import datetime
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import f8sub
from f8sub.weights import agreement
from tests.data_sets import gaussian, generator
from tests.models import Stack, seed_weights, shard
from tests.wire import Wire

STEPS, APART = 4, 2


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """`continue` after backward."""


def call_alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    f8sub.precompute_scales(model)


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The weights as they are; its own scales of them are the same, and it reduces."""
    model.load_state_dict(model.state_dict())
    f8sub.precompute_scales(model)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    f8sub.precompute_scales(model)


def step_alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


ACTIONS = {
    "left out": (nothing, step),
    "its step left out": (call_alone, step),
    "a load in its place": (load, step),
    "left out, and nobody precomputes": (nothing, step_alone),
    "precompute_scales left out": (step_alone, step),
    "only one steps": (step, nothing),
}
Action = Callable[[nn.Module, torch.optim.Optimizer], None]


def train(rank: int, of_one: Action, of_others: Action, **options) -> list[Any]:
    """Results of each forward, the weights at the end, and the model."""
    model = f8sub.convert_to_float8(seed_weights(Stack(64, 48, 32)), skip_defaults=False, **options)
    model = shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    f8sub.precompute_scales(model)
    results = []
    for i in range(STEPS):
        y = model(gaussian((16, 64), generator(10 * i + rank)))
        y.backward(gaussian(tuple(y.shape), generator(10 * i + rank + 5)))
        action = (of_one if rank == 0 else of_others) if i == APART else step
        action(model, optimizer)
        optimizer.zero_grad()
        results.append(y.detach())
    results.append(model(gaussian((16, 64), generator(3))).detach())
    return [*results, *(p.full_tensor().detach() for p in model.parameters()), model]


def impatient() -> Any:
    """However long ranks wait for each other, results are the same."""
    return mock.patch.object(agreement, "PATIENCE", datetime.timedelta(milliseconds=200))


@pytest.mark.parametrize("name", ACTIONS)
def test_training_goes_on(rank, world, name):
    with warnings.catch_warnings(), impatient():
        warnings.simplefilter("ignore", f8sub.Float8Warning)
        *found, _ = train(rank, *ACTIONS[name])
        *expected, _ = train(rank, *ACTIONS[name], float8_all_gather=False)
    assert all(map(torch.equal, found, expected))
    assert all(each.isfinite().all() for each in found)


@pytest.mark.parametrize("gathers", [True, False], ids=["gathered", "not gathered"])
def test_histories_stay_alike_on_all_ranks(rank, world, gathers):
    with warnings.catch_warnings(), impatient():
        warnings.simplefilter("ignore", f8sub.Float8Warning)
        *found, model = train(rank, nothing, step, recipe="delayed", float8_all_gather=gathers)
    assert all(each.isfinite().all() for each in found)
    least = torch.cat([buffer.flatten().float() for buffer in model.buffers() if buffer.is_floating_point()])
    most = least.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    assert least.numel() > 10
    assert torch.equal(least, most)


def nothing_before_an_impatient_forward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The forward waits for ranks that stepped, and did not come to it; any other wait is for all of them."""
    patience, agreement.PATIENCE = agreement.PATIENCE, datetime.timedelta(milliseconds=100)

    def be_patient(*_: object) -> None:
        agreement.PATIENCE = patience
        handle.remove()

    handle = model.register_forward_hook(be_patient)


def test_it_is_a_warning_with_rank_event_and_remedy(rank, world):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", f8sub.Float8Warning)
        train(rank, nothing_before_an_impatient_forward, step)
    told = [str(w.message) for w in caught if "was not called on rank" in str(w.message)]
    assert len(told) == (rank == 0)
    assert all(word in text for text in told for word in ("rank 0", "step()", "isfinite"))


def test_micro_batches_reduce_once_a_step(rank, world):
    model = shard(f8sub.convert_to_float8(seed_weights(Stack(64, 48, 32)), skip_defaults=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    f8sub.precompute_scales(model)
    for _ in range(2):
        with Wire() as wire:
            for i in range(3):
                model(gaussian((8, 64), generator(i))).backward(gaussian((8, 32), generator(i + 1)))
            step(model, optimizer)
        assert wire.all_reduces == 1
