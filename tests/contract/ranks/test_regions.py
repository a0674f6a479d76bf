"""The contract of regions: what each is given, by the exchange that carries it, and what it gives.

A new region is a value of ``REGIONS``; what it does with the maxima is tested with its feature.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import f8sub
from f8sub.weights.conversion import Conversion, Guest
from f8sub.weights.exchange import Exchange
from tests.data_sets import gaussian, generator
from tests.models import Stack, replicated, seed_weights, shard
from tests.wire import Wire


class Probe(Guest):
    """A guest whose region is due after every optimizer step, writes what is of this rank, and always tells."""

    size = 3

    due = False

    def region(self, records: Any, before: Any) -> "Probe":
        return self

    def stepped(self, weights: Any) -> None:
        self.due = True

    def write(self, out: torch.Tensor) -> None:
        self.due = False
        out.copy_(torch.tensor([1.0, 2.0, 3.0]).roll(dist.get_rank()))

    def read(self, reduced: torch.Tensor, weight_amax: torch.Tensor) -> torch.Tensor:
        return reduced.clone()

    def report(self, found: torch.Tensor) -> list[str]:
        return []


def of_a_guest() -> nn.Module:
    model = f8sub.convert_to_float8(seed_weights(Stack(32, 48, 32)), recipe="rowwise")
    model.layers[0]._f8sub.conversion.guests.append(Probe(model.layers[0]._f8sub.conversion))
    Conversion.counts_steps = True
    return model


REGIONS: dict[str, Callable[[], nn.Module]] = {
    "of a guest": of_a_guest,
    "of histories": lambda: f8sub.convert_to_float8(seed_weights(Stack(32, 48, 32)), recipe="delayed"),
}


class Spied:
    """A region, and all that it is asked, in order."""

    def __init__(self, region: Any) -> None:
        self._region, self.calls = region, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._region, name)

    def write(self, out: torch.Tensor) -> None:
        assert (out.shape, out.dtype) == ((self._region.size,), torch.float32)
        self._region.write(out)
        self.calls.append(("write", out.clone()))

    def read(self, reduced: torch.Tensor, weight_amax: torch.Tensor) -> torch.Tensor:
        found = self._region.read(reduced, weight_amax)
        self.calls.append(("read", reduced.clone(), weight_amax.clone(), found.clone()))
        return found

    def report(self, found: torch.Tensor) -> list[str]:
        self.calls.append(("tell", found.clone()))
        return self._region.report(found)


def spy(model: nn.Module) -> tuple[Exchange, Spied]:
    (exchange,) = model.layers[0]._f8sub.conversion.exchanges.values()
    ((guest, region),) = exchange.table.regions.items()
    exchange.table.regions[guest] = Spied(region)
    return exchange, exchange.table.regions[guest]


def carried(rank: int, name: str, replicas: int = 1) -> tuple[list, list, list[int]]:
    """What the region was asked in two steps and one call without a step, then the weights' amaxes; all-reduces."""
    model = shard(REGIONS[name](), mesh=replicated(replicas))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    f8sub.precompute_scales(model)
    exchange, region = spy(model)
    reductions = []
    for seed in (10 * rank, 10 * rank + 2, None):
        if seed is not None:
            model(gaussian((8, 32), generator(seed))).backward(gaussian((8, 32), generator(seed + 1)))
            optimizer.step()
            optimizer.zero_grad()
        with Wire() as wire:
            f8sub.precompute_scales(model)
            exchange.settle()
        reductions.append(wire.all_reduces)
    amaxes = [p.full_tensor().abs().amax().item() for p in model.parameters()]
    return region.calls, amaxes, reductions


@pytest.mark.parametrize(
    ("world", "replicas"), [(1, 1), (2, 1), (4, 2)], ids=["alone", "sharded", "replicas"]
)
@pytest.mark.parametrize("name", REGIONS)
def test_what_every_rank_wrote_is_read_as_its_maximum_by_all(rank, world, name, replicas):
    """HSDP's replicas take part, whose weights are alike and whose regions are not."""
    for kind, tensor, *_ in carried(rank, name, replicas)[0]:
        if kind == "write":
            expected = tensor.clone()
            dist.all_reduce(expected, dist.ReduceOp.MAX)
        elif kind == "read":
            assert torch.equal(tensor, expected)


@pytest.mark.parametrize("name", REGIONS)
def test_it_rides_along_once_a_step_and_is_told_by_the_next(rank, world, name):
    calls, amaxes, reductions = carried(rank, name)
    assert reductions == [1, 1, 1]
    assert [call[0] for call in calls if call[0] != "tell"] == ["write", "read"] * 2
    reads = [call for call in calls if call[0] == "read"]
    if name == "of histories":
        assert sorted(reads[-1][2].tolist())[-2:] == sorted(amaxes)
    tells = [call[1] for call in calls if call[0] == "tell"]
    assert all(any(torch.equal(told, read[3]) for read in reads) for told in tells)
    assert len(tells) == (2 if reads[0][3].any() else 0)
