"""Fused norms under FSDP2 and tensor parallelism: bitwise the modules one after the other, eager and compiled."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import f8sub
from f8sub import norm as fused_norm
from f8sub.context import contexts
from f8sub.norm import FusedNorm
from tests.compiling import WIDTH, compile_blocks, differences, train
from tests.data_sets import gaussian, generator
from tests.dist.models import BF16, seed_weights, shard
from tests.dist.test_feed_forward import FeedForward
from tests.dist.wires import on_each

RECIPES = ("tensorwise", "rowwise", "blockwise", "gridquant", "delayed")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(torch.tanh(self.q(x)) * self.k(x) + self.v(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Blocks(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def model(recipe: str, *, fused: bool, all_gather: bool = True, blocks: int = 2) -> nn.Module:
    made = seed_weights(Blocks(blocks))
    f8sub.convert_to_float8(made, recipe=recipe, float8_all_gather=all_gather)
    if fused:
        f8sub.fuse_producers(made)
        assert sum(isinstance(module, FusedNorm) for module in made.modules()) == 2 * blocks
        # Else feed-forwards run layer by layer, and equal themselves.
        assert not contexts.entered
    return made


def sharded(made: nn.Module, how: str) -> nn.Module:
    """By blocks; or what the blocks call by itself, their norms with the root or by themselves, too."""
    if how.startswith("blocks"):
        return shard(made, BF16, reshard_after_forward="not resharded" not in how)
    for block in made.blocks:
        alone = [block.attention, block.feed_forward] + [block.norm1, block.norm2] * (how == "norms alone")
        for module in alone:
            fully_shard(module, mp_policy=BF16)
    return fully_shard(made, mp_policy=BF16)


def steps(rank: int, world: int, recipe: str, how: str) -> tuple[list[str], int]:
    """What differs, and how many norms were left to their readers."""
    runs = []
    with mock.patch.object(fused_norm, "_measured", wraps=fused_norm._measured) as measured:
        for fused in (True, False):
            made = model(recipe, fused=fused, all_gather="gathered in bf16" not in how)
            runs.append(train(sharded(made, how), steps=3, rank=rank))
    return differences(*runs), measured.call_count


@pytest.mark.parametrize(
    "how",
    [
        "blocks",
        *(
            pytest.param(how, marks=pytest.mark.long)
            for how in ("blocks not resharded", "blocks gathered in bf16", "parts", "norms alone")
        ),
    ],
)
@on_each(RECIPES)
def test_sharded_they_are_bitwise_the_modules(ranks, recipe, how):
    for wrong, measured in ranks(2, steps, recipe, how):
        assert wrong == []
        assert measured == (0 if how == "norms alone" else 3 * 4)


def compiled_steps(rank: int, world: int, recipe: str) -> list[str]:
    torch._dynamo.reset()
    runs = []
    for compiled in (True, False):
        made = model(recipe, fused=True, blocks=1)
        runs.append(train(shard(compile_blocks(made) if compiled else made, BF16), steps=3, rank=rank))
    return differences(*runs)


@pytest.mark.long
def test_compiled_they_are_bitwise_eager(ranks):
    for found in ranks(2, compiled_steps, "delayed"):
        assert found == []


def tensor_parallel(rank: int, world: int, recipe: str) -> list[bool]:
    """Norms that are whole on every rank, before layers that are cut: what reads them are DTensors."""
    mesh = init_device_mesh("cpu", (world,))
    plan = {
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.o": RowwiseParallel(),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(),
    }
    found = []
    for fused in (True, False):
        made = model(recipe, fused=fused).bfloat16()
        for block in made.blocks:
            parallelize_module(block, mesh, plan)
        x = gaussian((2, 12, WIDTH), generator(1)).bfloat16().requires_grad_()
        y = made(x)
        y.backward(gaussian(tuple(y.shape), generator(2)).bfloat16())
        gradients = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in made.parameters()]
        found.append([y.detach(), x.grad, *gradients])
    return [torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True)]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_tensor_parallel_layers_read_them_in_high_precision(ranks, recipe):
    for equal in ranks(2, tensor_parallel, recipe):
        assert all(equal)
