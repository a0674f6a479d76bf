"""Context parallelism is nothing to the linear layers: ranks that have parts of each sequence shard the weights too.

torch's ``context_parallel`` has no attention for CPUs, so the blocks' attention gathers keys and values itself.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import shard, take_step, transformer
from tests.wires import on_each

RECIPES = ("tensorwise", "rowwise", "blockwise", "delayed")
TOKENS, STEPS = 8, 3


def over_whole_sequences(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of this rank's queries to all ranks' keys and values, each (batch, tokens, width)."""
    k, v = (all_gather_tensor_autograd(part.contiguous(), 1, dist.group.WORLD) for part in (k, v))
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = generator(step)
    return gaussian((2, TOKENS, 32), rng), torch.randint(11, (2, TOKENS), generator=rng)


def train(model: nn.Module, rank: int, world: int) -> list[float]:
    """The mean loss of all tokens, of every step."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(STEPS):
        f8sub.precompute_scales(model)
        x, target = (part.chunk(world, 1)[rank] for part in batch(step))
        loss = F.cross_entropy(model(x).flatten(0, 1), target.flatten())
        take_step(optimizer, loss)
        mean = loss.detach() / world
        if world > 1:
            dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def on_and_off(rank: int, world: int, recipe: str) -> list[list[float]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(F, "scaled_dot_product_attention", over_whole_sequences)
        return [
            train(shard(transformer(recipe, spread=2.0, all_gather=all_gather)), rank, world)
            for all_gather in (True, False)
        ]


@on_each(RECIPES)
def test_losses(ranks, recipe):
    """One scale of all tokens is another one for a part of them; rows have theirs either way."""
    whole = train(transformer(recipe, spread=2.0), 0, 1)
    for on, off in ranks(2, on_and_off, recipe):
        assert on == off
        assert on[0] == pytest.approx(whole[0], rel=1e-5 if recipe == "rowwise" else 1e-2)
        assert on == pytest.approx(whole, rel=1e-2)
