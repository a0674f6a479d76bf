"""Training with float8 reductions: pipelines, and losses beside those of float32 sums and of a control that fails."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import f8sub
from f8sub.gradients import wire
from tests.data_sets import gaussian, generator
from tests.gradients.models import FLOAT32
from tests.gradients.oracle import decibels
from tests.models import Block, seed_weights
from tests.selection import long_but
from tests.wire import Wire

WIDTH, MICROBATCHES = 32, 4


@pytest.mark.parametrize("world", [4])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_pipeline(rank, world):
    """Two stages over two ranks each: micro-batches are added up before they are reduced."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    index, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    found, calls = [], []
    for reduce in (f8sub.reduce_gradients_in_float8, lambda model: None):
        blocks = seed_weights(nn.Sequential(*(Block(WIDTH, 48) for _ in range(4))), 2.0)
        module = nn.Sequential(*blocks[2 * index : 2 * index + 2])
        for block in module:
            fully_shard(block, mesh=mesh["dp"], mp_policy=FLOAT32)
        fully_shard(module, mesh=mesh["dp"], mp_policy=FLOAT32)
        reduce(module)
        stage = PipelineStage(module, index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
        rng = generator(replica)
        x, target = (gaussian((2 * MICROBATCHES, 4, WIDTH), rng) for _ in range(2))
        with Wire() as counted:
            Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss).step(
                *((x,) if stage.is_first else ()), **({"target": target} if stage.is_last else {})
            )
        found.append([p.grad.full_tensor() for p in module.parameters()])
        calls.append(counted.calls["alltoall_base_"])
    assert calls == [2, 0]
    for ours, right in zip(*found, strict=True):
        assert decibels(ours, right) > 29


def losses(rank: int, world: int, seed: int, steps: int) -> dict[str, float]:
    """Mean of the last 20 losses of a small network that learns a fixed one, by how gradients are reduced."""
    return {how: final_loss(rank, world, seed, steps, how) for how in ("float32", "e4m3", "control")}


def final_loss(rank: int, world: int, seed: int, steps: int, how: str) -> float:
    rng = generator(seed)
    teacher = gaussian((64, 32), rng)
    sizes = [32, 96, 96, 64]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(gaussian(layer.weight.shape, rng) / layer.in_features**0.5)
            layer.bias.zero_()
    model = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])
    for layer in layers:
        fully_shard(layer, mp_policy=FLOAT32)
    fully_shard(model, mp_policy=FLOAT32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if how != "float32":
        f8sub.reduce_gradients_in_float8(model)
    batches, found = generator(1000 * seed + rank), []
    with pytest.MonkeyPatch.context() as patch:
        if how == "control":
            patch.setattr(wire, "encode", of_three_levels)
        for _ in range(steps):
            x = gaussian((32, 32), batches)
            loss = F.mse_loss(model(x), (x @ teacher.t()).tanh())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
    mean = torch.stack(found[-20:]).mean()
    torch.distributed.all_reduce(mean)
    return mean.item() / world


def of_three_levels(x: torch.Tensor, encode=wire.encode) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of a chunk with its sign, and zero: what a scale that does not suit small elements leaves."""
    largest = x.abs().amax(-1, keepdim=True)
    return encode(torch.round(x / largest.clamp(min=1e-30)) * largest)


@pytest.mark.parametrize(("world", "seed", "steps"), long_but([(2, 1, 40)], [(2, 1, 40), (4, 1, 60)]))
def test_losses(ranks, world, seed, steps):
    found = ranks(world, losses, seed, steps)[0]
    assert found["e4m3"] == pytest.approx(found["float32"], rel=0.002)
    assert found["e4m3"] != found["float32"]
    assert found["control"] > 1.1 * found["float32"]
