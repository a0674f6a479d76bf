"""DistributedDataParallel, fully_shard, HSDP's shards of one and no wrapper at all: the same numbers."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import f8sub
from f8sub.features.delayed.layers import states_of
from tests.data_sets import gaussian, generator
from tests.models import float8_layers, loss_of, seed_weights, shard, transformer
from tests.wire import Wire
from tests.wires import on_each

RECIPES = ("tensorwise", "rowwise", "blockwise", "delayed")
STEPS = 4
WRAPPERS = ("ddp", "fsdp", "hsdp")


def delayed(**options: Any) -> f8sub.Recipe:
    return f8sub.get_recipe("delayed", amax_history_len=3, **options)


def wrapped(model: nn.Module, wrapper: str, world: int) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    if wrapper == "hsdp":
        return shard(model, mesh=init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard")))
    return shard(model)


def histories(model: nn.Module) -> dict[str, torch.Tensor]:
    model.state_dict()  # what is under way is finished
    states = [state for layer in float8_layers(model) for state in states_of(layer)]
    return {f"{i}.{name}": b.clone() for i, state in enumerate(states) for name, b in state.named_buffers()}


def train(model: nn.Module, parts: list[int]) -> list[list[float]]:
    """Losses of every rank's part of the batches, gradients of the parts averaged."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    f8sub.precompute_scales(model)
    losses: list[list[float]] = [[] for _ in parts]
    for step in range(STEPS):
        for index, part in enumerate(parts):
            loss = loss_of(model, step, part)
            loss.backward()
            losses[index].append(loss.item())
        if len(parts) > 1:
            for parameter in model.parameters():
                parameter.grad /= len(parts)
        optimizer.step()
        optimizer.zero_grad()
        f8sub.precompute_scales(model)
    return losses


def on_a_rank(rank: int, world: int, recipe: str) -> list:
    found = []
    for wrapper in WRAPPERS:
        model = wrapped(transformer(delayed() if recipe == "delayed" else recipe, spread=2.0), wrapper, world)
        found.append((train(model, [rank])[0], histories(model)))
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning")
@on_each(RECIPES)
def test_the_same_numbers_whatever_the_wrapper(ranks, recipe):
    """Two ranks add two numbers, in whichever order: bitwise."""
    alone = transformer(delayed() if recipe == "delayed" else recipe, spread=2.0)
    expected, expected_histories = train(alone, [0, 1]), histories(alone)
    assert bool(expected_histories) == (recipe == "delayed")
    for rank, found in enumerate(ranks(2, on_a_rank, recipe)):
        for losses, buffers in found:
            assert losses == expected[rank]
            assert buffers.keys() == expected_histories.keys()
            assert all(torch.equal(buffers[name], expected_histories[name]) for name in buffers)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def replicas(**options: Any) -> nn.Module:
    return DistributedDataParallel(f8sub.convert_to_float8(seed_weights(Mlp()), recipe=delayed(**options)))


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


@pytest.mark.filterwarnings("ignore::FutureWarning")
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
    assert all(torch.equal(one[name], other[name]) for name in one) == reduce_amax


def bad_on_one_rank(rank: int, world: int) -> str:
    model = replicas()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = gaussian((8, 32), generator(1))
    x[2, 3] = torch.inf if rank == 1 else 1.0
    y = model(x).nan_to_num()
    y.backward(gaussian(tuple(y.shape), generator(2)))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    try:
        f8sub.precompute_scales(model)
    except f8sub.Float8NumericsError as error:
        return str(error)
    return "no error"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_one_replica_s_bad_activation_is_told_on_every_rank(ranks):
    for message in ranks(2, bad_on_one_rank):
        assert "x of up" in message


def of_uneven_inputs(rank: int, world: int) -> str:
    model = replicas()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with pytest.raises(f8sub.Float8ConfigError) as refusal, model.join():  # noqa: PT012
        for _ in range(1 + rank):
            y = model(gaussian((8, 32), generator(1)))
            y.backward(gaussian(tuple(y.shape), generator(2)))
            optimizer.step()
    return str(refusal.value)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_ranks_that_may_step_differently_often_are_refused(ranks):
    """Those with more inputs would wait for the others."""
    for message in ranks(2, of_uneven_inputs):
        assert "down" in message
        assert "ddp.join()" in message
