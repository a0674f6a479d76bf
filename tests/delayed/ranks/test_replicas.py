"""Delayed scaling under DistributedDataParallel: replicas share their histories, by one all-reduce a step."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import f8sub
from f8sub.delayed.state import states_of
from tests.data_sets import gaussian, generator
from tests.models import Stack, equal, float8_layers, seed_weights
from tests.wire import Wire

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def replicas(**options: Any) -> nn.Module:
    recipe = f8sub.get_recipe("delayed", amax_history_len=3, **options)
    return DistributedDataParallel(f8sub.convert_to_float8(seed_weights(Stack(32, 48, 32)), recipe=recipe))


def histories(model: nn.Module) -> dict[str, torch.Tensor]:
    model.state_dict()  # what is under way is finished
    states = [state for layer in float8_layers(model) for state in states_of(layer)]
    return {f"{i}.{name}": b.clone() for i, state in enumerate(states) for name, b in state.named_buffers()}


def accumulate(model: nn.Module, rank: int, *, synchronized: bool) -> list[int]:
    """Two steps of three microbatches, the first one's x the largest; all-reduces at the end of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    reduces = []
    for step in range(2):
        for micro in range(3):
            x = (8.0 if micro == 0 else 1.0) * (1 + rank) * gaussian((8, 32), generator(10 * step + micro))
            model.require_backward_grad_sync = synchronized or micro == 2
            model(x).square().sum().backward()
        with Wire() as wire:
            optimizer.step()
            f8sub.precompute_scales(model)
        optimizer.zero_grad()
        reduces.append(wire.all_reduces)
    return reduces


def microbatches(rank: int, world: int, reduce_amax: bool) -> list:
    found = []
    for synchronized in (True, False):
        model = replicas(reduce_amax=reduce_amax)
        found.append((accumulate(model, rank, synchronized=synchronized), histories(model)))
    return found


@pytest.mark.parametrize("reduce_amax", [True, False])
def test_replicas_share_what_all_microbatches_saw(ranks, reduce_amax):
    """One all-reduce a step; DDP, which broadcasts rank 0's buffers at a forward, leaves the histories alone."""
    results = ranks(2, microbatches, reduce_amax)
    for rank, found in enumerate(results):
        for reduces, buffers in found:
            seen = 1 if reduce_amax else rank
            first = [gaussian((8, 32), generator(10 * step)).abs().max() for step in range(2)]
            assert reduces == [1, 1]
            assert buffers["0.history_x"].tolist() == [0.0, *((8.0 * (1 + seen) * x).item() for x in first)]
    (_, one), (_, other) = results[0][0], results[1][0]
    assert equal(one, other) == reduce_amax


def test_ranks_that_may_step_differently_often_are_refused(rank, world):
    """Those with more inputs would wait for the others."""
    model = replicas()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    told = r"layers\.0: its amax histories.*ddp\.join\(\)"
    with pytest.raises(f8sub.Float8ConfigError, match=told), model.join():  # noqa: PT012
        for _ in range(1 + rank):
            y = model(gaussian((8, 32), generator(1)))
            y.backward(gaussian(tuple(y.shape), generator(2)))
            optimizer.step()
