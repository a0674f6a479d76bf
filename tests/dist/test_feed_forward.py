"""Fused feed-forwards under FSDP2: bitwise the layers one after the other, eager and compiled."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import f8sub
from f8sub.feed_forward import FusedFeedForward
from tests.compiling import HIDDEN, WIDTH, compile_blocks, differences, train
from tests.dist.models import BF16, seed_weights, shard
from tests.dist.wires import ONE_RECIPE_A_WIRE, on_each

POLICIES = {"fp32": None, "bf16": BF16}


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed_forward = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.feed_forward(self.norm(x))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def model(
    recipe: str, policy: str, all_gather: bool, *, fused: bool, compiled: bool = False, reshard: bool = True
) -> nn.Module:
    made = f8sub.convert_to_float8(seed_weights(Blocks()), recipe=recipe, float8_all_gather=all_gather)
    if fused:
        f8sub.fuse_producers(made)
    if compiled:
        compile_blocks(made)
    return shard(made, POLICIES[policy], reshard_after_forward=reshard)


def steps(rank: int, world: int, recipe: str, policy: str, all_gather: bool, reshard: bool) -> list[str]:
    runs = [
        train(model(recipe, policy, all_gather, fused=fused, reshard=reshard), steps=3, rank=rank)
        for fused in (True, False)
    ]
    return differences(*runs)


@pytest.mark.parametrize(
    "case",
    ["bf16", *(pytest.param(c, marks=pytest.mark.long) for c in ("fp32", "bf16 not resharded", "bf16 gathered in bf16"))],
)
@on_each(ONE_RECIPE_A_WIRE)
def test_sharded_they_are_bitwise_the_layers(ranks, recipe, case):
    arguments = recipe, case.split()[0], "gathered in bf16" not in case, "not resharded" not in case
    for found in ranks(2, steps, *arguments):
        assert found == []


def compiled_steps(rank: int, world: int, recipe: str) -> list[str]:
    torch._dynamo.reset()
    runs = [
        train(model(recipe, "bf16", True, fused=True, compiled=compiled), steps=3, rank=rank)
        for compiled in (True, False)
    ]
    return differences(*runs)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["blockwise", "delayed"])
def test_compiled_they_are_bitwise_eager(ranks, recipe):
    for found in ranks(2, compiled_steps, recipe):
        assert found == []


def one_by_one(rank: int, world: int) -> tuple[list[str], bool]:
    """Each linear layer sharded by itself, and the feed-forwards called."""
    from torch.distributed.fsdp import fully_shard

    found = []
    for fused in (True, False):
        made = f8sub.convert_to_float8(seed_weights(Blocks()))
        if fused:
            f8sub.fuse_producers(made)
        for layer in [m for m in made.modules() if isinstance(m, f8sub.Float8Linear)]:
            fully_shard(layer)
        found.append(train(fully_shard(made), steps=2, rank=rank))
    is_fused = isinstance(made.blocks[0].feed_forward, FusedFeedForward)
    return differences(*found), is_fused


def test_layers_that_are_gathered_by_themselves_run_by_themselves(ranks):
    for wrong, unfused_is_fused in ranks(2, one_by_one):
        assert wrong == []
        assert not unfused_is_fused
