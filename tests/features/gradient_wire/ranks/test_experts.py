"""Gradients of experts with e4m3 codes on the wire: 3-D weights, expert parallelism, and experts in float8."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import f8sub
from tests.data_sets import gaussian, generator
from tests.features.experts.models import OwnExperts
from tests.features.gradient_wire import oracle
from tests.features.gradient_wire.models import FLOAT32, gradients, same

WIDTH, HIDDEN = 32, 48


class Model(nn.Module):
    """Experts behind a linear layer that all ranks share."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = OwnExperts(experts, WIDTH, HIDDEN)
        with torch.no_grad():
            self.first.weight.copy_(gaussian((WIDTH, WIDTH), generator(9)) / WIDTH**0.5)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return self.experts(self.first(x), ends)


def backward(model: nn.Module, seed: int, experts: int) -> None:
    """Tokens in uneven groups, some of them empty, and a random cotangent."""
    rng = generator(seed)
    ends = torch.randint(0, 3, (experts,), generator=rng).mul(5).cumsum(0)
    x = gaussian((int(ends[-1]) + 5, WIDTH), rng)
    model(x, ends).backward(gaussian((len(x), WIDTH), rng))


def own_gradients(ranks: int, experts: int) -> list[list[torch.Tensor]]:
    """By parameter, of each rank."""
    found = []
    for rank in range(ranks):
        model = Model(experts)
        backward(model, rank, experts)
        found.append([p.grad for p in model.parameters()])
    return [list(each) for each in zip(*found, strict=True)]


def bits(rank: int, world: int, experts: int, dim: int) -> None:
    model = Model(experts)
    fully_shard(model.experts, mp_policy=FLOAT32, shard_placement_fn=lambda weight: Shard(dim))
    fully_shard(model, mp_policy=FLOAT32)
    f8sub.reduce_gradients_in_float8(model)
    backward(model, rank, experts)
    first, *others = own_gradients(world, experts)
    assert same(gradients(model), [oracle.summed(first), *(oracle.summed(each, dim=dim) for each in others)])


@pytest.mark.parametrize(("world", "experts", "dim"), [(2, 4, 0), (2, 3, 0), (3, 2, 0), (2, 3, 1)])
def test_bits(ranks, world, experts, dim):
    """Experts that the ranks divide and do not, a rank that has none, and every expert's rows over the ranks."""
    ranks(world, bits, experts, dim)
