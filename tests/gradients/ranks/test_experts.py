"""Gradients of experts with e4m3 codes on the wire: 3-D weights, expert parallelism, and experts in float8."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import f8sub
from tests.data_sets import gaussian, generator
from tests.experts.models import OwnExperts
from tests.gradients import oracle
from tests.gradients.models import FLOAT32, gradients, same
from tests.wire import Wire

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


@pytest.mark.parametrize(("world", "experts", "dim"), [(2, 4, 0), (2, 3, 0), (3, 2, 0), (2, 3, 1)])
def test_bits(rank, world, experts, dim):
    """Experts that the ranks divide and do not, a rank that has none, and every expert's rows over the ranks."""
    model = Model(experts)
    fully_shard(model.experts, mp_policy=FLOAT32, shard_placement_fn=lambda weight: Shard(dim))
    fully_shard(model, mp_policy=FLOAT32)
    f8sub.reduce_gradients_in_float8(model)
    backward(model, rank, experts)
    first, *others = own_gradients(world, experts)
    assert same(gradients(model), [oracle.summed(first), *(oracle.summed(each, dim=dim) for each in others)])


@pytest.mark.parametrize("world", [4])
def test_expert_parallelism(rank, world):
    """This rank's experts over ranks that have the same ones, and all else over all ranks; a mean over all of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    ep, replica = mesh["ep"].get_local_rank(), mesh["fsdp"].get_local_rank()
    own = []  # by replica: each rank of expert parallelism has half of the experts
    for seed in range(2):
        whole = OwnExperts(4, WIDTH, HIDDEN)
        backward(whole, seed, 4)
        own.append([p.grad for p in whole.parameters()])
    experts = OwnExperts(4, WIDTH, HIDDEN)
    for name, parameter in list(experts.named_parameters()):
        local = distribute_tensor(parameter, mesh["ep"], [Shard(0)])
        experts.register_parameter(name, nn.Parameter(local))
    fully_shard(experts, mesh=mesh["fsdp"], mp_policy=FLOAT32)
    experts.set_gradient_divide_factor(float(world))
    model = nn.ModuleDict({"experts": experts, "dense": nn.Linear(WIDTH, WIDTH, bias=False)})
    fully_shard(model["dense"], mp_policy=FLOAT32)
    reduction = f8sub.reduce_gradients_in_float8(model)
    assert "of 2 FSDP2 modules" in str(reduction)
    rng = generator(replica)
    ends = torch.randint(0, 3, (4,), generator=rng).mul(5).cumsum(0)
    x = gaussian((int(ends[-1]) + 5, WIDTH), rng)
    dy = gaussian((len(x), WIDTH), rng)
    here = slice(2 * ep, 2 * ep + 2)
    first = int(ends[here.start - 1]) if ep else 0
    rows = slice(first, int(ends[here.stop - 1]))
    with Wire() as wire:
        experts(x[rows], ends[here] - first).backward(dy[rows])
    assert wire.calls["alltoall_base_"] == 1
    found = [p.grad.full_tensor()[here] for p in experts.parameters()]
    parts = [[each[here] for each in pair] for pair in zip(*own, strict=True)]
    assert same(found, [oracle.summed(pair, factor=1 / world) for pair in parts])


def losses(rank: int, world: int, reduced: bool) -> list[float]:
    """Of a model whose experts are gathered and multiplied in float8."""
    f8sub.register_experts(OwnExperts)
    options = {"experts": True, "skip_defaults": False, "backend": "reference"}
    model = f8sub.convert_to_float8(Model(3), "rowwise", **options)
    fully_shard(model.experts, mp_policy=FLOAT32)
    fully_shard(model, mp_policy=FLOAT32)
    if reduced:
        f8sub.reduce_gradients_in_float8(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rng, found = generator(rank), []
    ends = torch.tensor([10, 10, 25])
    for _ in range(8):
        f8sub.precompute_scales(model)
        x = gaussian((25, WIDTH), rng)
        loss = (model(x, ends) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_experts_in_float8_train(ranks):
    ours, right = (ranks(2, losses, reduced)[0] for reduced in (True, False))
    assert ours == pytest.approx(right, rel=0.02)
    assert ours != right
    assert ours[-1] < 0.8 * ours[0]
