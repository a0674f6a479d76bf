"""Gradients of FSDP2 with e4m3 codes on the wire: the bits are an oracle's, in each way of running FSDP2."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import f8sub
from tests.features.gradient_wire import oracle
from tests.features.gradient_wire.models import (
    HIDDEN,
    backward,
    gradients,
    network,
    own_gradients,
    reduced,
    same,
    sharded,
)
from tests.wire import Wire


def expected(ranks: int, hidden: int = HIDDEN, **options) -> list[torch.Tensor]:
    return [oracle.summed(each, **options) for each in own_gradients(ranks, hidden)]


def bits(rank: int, world: int, hidden: int) -> None:
    model = sharded(network(hidden))
    found = reduced(rank, model)
    assert same(found, expected(world, hidden))
    for parameter in model.parameters():
        assert type(parameter.grad.to_local()) is torch.Tensor
        assert parameter.grad.dtype == torch.float32
    for parameter in model.parameters():
        parameter.grad = None
    backward(model, rank)
    assert all(map(torch.equal, gradients(model), found))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("hidden", [40, 41, 3])
def test_bits(ranks, world, hidden):
    """Rows that the ranks divide, that they do not, and fewer rows than ranks; twice the same."""
    ranks(world, bits, hidden)
