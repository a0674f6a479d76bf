"""AdamW steps under each wrapper: the same losses with the float8 all-gather, without it, and without sharding.

What may differ between a sharded and an unsharded run is the order in which gradients are summed. One rank
sums nothing and two ranks add two numbers, so an unsharded run that adds the two ranks' gradients has the
same sums, and equality is bitwise. Of more ranks, y and dx are, see ``test_gathered_weight``; with a policy of bf16 the
losses are those without the float8 all-gather, see ``test_fsdp_modes``.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import f8sub
from tests.compiling import whole
from tests.models import equal, loss_of, replicated, shard, train, transformer
from tests.selection import long_but

STEPS = 4
SPREAD = 4.0
CASES = [*((recipe, 2) for recipe in ("tensorwise", "delayed", "rowwise", "blockwise")), ("delayed", 1)]
"""Recipe and ranks."""


def made(recipe: str, all_gather: bool = True) -> nn.Module:
    chosen = f8sub.get_recipe("delayed", amax_history_len=3) if recipe == "delayed" else recipe
    return transformer(chosen, spread=SPREAD, all_gather=all_gather)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


def wrapped(recipe: str) -> dict[str, nn.Module]:
    return {
        "on": shard(made(recipe)),
        "off": shard(made(recipe, False)),
        "shards of one": shard(made(recipe), mesh=replicated(dist.get_world_size())),
        "DDP": DistributedDataParallel(made(recipe)),
    }


def state_of(model: nn.Module) -> list[torch.Tensor]:
    """Weights and, of delayed scaling, histories and scales."""
    model.state_dict()  # what is under way is finished
    return [whole(tensor) + 0 for tensor in (*model.parameters(), *model.buffers())]


def unsharded(recipe: str, ranks: int) -> tuple[list[list[float]], list[torch.Tensor]]:
    """Losses of each rank's part of the batch, in one process."""
    model = made(recipe)
    parameters = list(model.parameters())
    optimizer = optimizer_of(parameters)
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for step in range(STEPS):
        for rank in range(ranks):
            loss = loss_of(model, step, rank)
            loss.backward()
            losses[rank].append(loss.item())
        for parameter in parameters:
            parameter.grad /= ranks
        optimizer.step()
        optimizer.zero_grad()
    return losses, state_of(model)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("recipe", "world"), long_but(CASES[:2], CASES))
def test_each_wrapper_is_the_unsharded_run(rank, world, recipe):
    expected_losses, expected = unsharded(recipe, world)
    found = {
        name: (train(model, rank, steps=STEPS, optimizer=optimizer_of(model.parameters())), state_of(model))
        for name, model in wrapped(recipe).items()
    }
    losses, state = found["on"]
    assert len(set(losses)) == len(losses)
    assert [name for name in found if not equal(found[name], found["on"])] == []
    assert losses == expected_losses[rank]
    assert equal(state, expected)
