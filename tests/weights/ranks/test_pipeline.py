"""Pipeline stages with process groups of their own: losses are the same, and a step has one all-reduce."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import Block, float8_layers, seed_weights
from tests.selection import long_but
from tests.wire import Wire

SCHEDULES = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
}
"""Each with the stages that a rank has."""

BLOCKS, WIDTH, STEPS, MICROBATCHES = 4, 32, 3, 4


def whole(recipe: str, all_gather: bool = True) -> nn.Sequential:
    model = nn.Sequential(*(Block(WIDTH, 48) for _ in range(BLOCKS)))
    return f8sub.convert_to_float8(seed_weights(model, 2.0), recipe=recipe, float8_all_gather=all_gather)


def batch(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = generator(10 * step + replica)
    return tuple(gaussian((2 * MICROBATCHES, 4, WIDTH), rng) for _ in range(2))


def parts_of(recipe: str, all_gather: bool, mesh: DeviceMesh, stages: int) -> list[PipelineStage]:
    """This rank's stages of a model that every rank made and converted whole."""
    model, count = whole(recipe, all_gather), 2 * stages
    found = []
    for index in range(mesh["pp"].get_local_rank(), count, 2):
        module = nn.Sequential(*model[index * BLOCKS // count : (index + 1) * BLOCKS // count])
        for block in module:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(module, mesh=mesh["dp"])
        found.append(PipelineStage(module, index, count, torch.device("cpu"), group=mesh["pp"].get_group()))
    return found


def train(rank: int, world: int, recipe: str, schedule: str, all_gather: bool) -> dict[str, object]:
    """Losses of the last stage's microbatches, names of the weights, and amax all-reduces of each step."""
    # Fills the memory with NaN on which torch runs a stage to learn its shapes.
    torch.use_deterministic_algorithms(True)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
    make, count = SCHEDULES[schedule]
    stages = parts_of(recipe, all_gather, mesh, count)
    runner = make(stages[0] if count == 1 else stages, MICROBATCHES, loss_fn=F.mse_loss)
    modules = [stage.submod for stage in stages]
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.5)
    losses: list[float] = []
    reduces: list[int] = []
    f8sub.precompute_scales(modules)
    for step in range(STEPS):
        x, target = batch(step, mesh["dp"].get_local_rank())
        of_step: list[torch.Tensor] = []
        first = (x,) if stages[0].is_first else ()
        last = {"target": target, "losses": of_step} if stages[-1].is_last else {}
        runner.step(*first, **last)
        losses += [loss.item() for loss in of_step]
        with Wire() as wire:
            optimizer.step()
            optimizer.zero_grad()
            f8sub.precompute_scales(modules)
        reduces.append(wire.all_reduces)
    names = {layer._f8sub.fqn for m in modules for layer in float8_layers(m)}
    return {"losses": losses, "names": names, "reduces": reduces}


def on_and_off(rank: int, world: int, recipe: str, schedule: str) -> list[dict]:
    return [train(rank, world, recipe, schedule, all_gather) for all_gather in (True, False)]


def in_one_process(recipe: str) -> list[float]:
    model, losses = whole(recipe), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        for x, target in zip(*(part.chunk(MICROBATCHES) for part in batch(step, 0)), strict=True):
            loss = F.mse_loss(model(x), target)
            loss.backward()
            losses.append(loss.item())
        for parameter in model.parameters():
            parameter.grad /= MICROBATCHES
        optimizer.step()
        optimizer.zero_grad()
    return losses


QUICK = [("tensorwise", "1f1b", 4), ("delayed", "interleaved", 2)]
CASES = [*QUICK, ("delayed", "gpipe", 4), ("rowwise", "interleaved", 4), ("blockwise", "interleaved", 2)]
"""Two ranks have shards of one, four have shards of two."""


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("recipe", "schedule", "world"), long_but(QUICK, CASES))
def test_losses_and_reductions(ranks, recipe, schedule, world):
    results = ranks(world, on_and_off, recipe, schedule)
    for on, off in results:
        assert on["losses"] == off["losses"]
        assert on["reduces"] == [int(world == 4)] * STEPS
    assert not results[0][0]["names"] & results[-1][0]["names"]
    if world == 2:
        assert results[-1][0]["losses"] == in_one_process(recipe)
