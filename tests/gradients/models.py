"""A small model, sharded, and the gradients that each rank has before they are reduced."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import f8sub
from tests.data_sets import gaussian, generator

IN, HIDDEN = 24, 40
FLOAT32 = MixedPrecisionPolicy(reduce_dtype=torch.float32)


def network(hidden: int = HIDDEN) -> nn.Sequential:
    """A few blocks of 128 a rank, and vectors shorter than one."""
    model = nn.Sequential(nn.Linear(IN, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, IN))
    rng = generator(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(gaussian(parameter.shape, rng) * 0.3)
    return model


def sharded(model: nn.Module, policy: MixedPrecisionPolicy = FLOAT32, **options: Any) -> nn.Module:
    """The layers by themselves, and what is left as a group of the model."""
    fully_shard(model[0], mp_policy=policy, **options)
    return fully_shard(model, mp_policy=policy, **options)


def backward(model: nn.Module, seed: int, dtype: torch.dtype = torch.float32) -> None:
    rng = generator(seed)
    y = model(gaussian((16, IN), rng).to(dtype))
    y.backward(gaussian(tuple(y.shape), rng).to(y.dtype))


def own_gradients(
    ranks: int,
    hidden: int = HIDDEN,
    change: Callable[[nn.Module], Any] = lambda model: None,
    dtype: torch.dtype = torch.float32,
) -> list[list[torch.Tensor]]:
    """By parameter, the gradients of each rank."""
    found = []
    for rank in range(ranks):
        model = network(hidden)
        change(model)
        model.to(dtype)
        backward(model, rank, dtype)
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    return [list(each) for each in zip(*found, strict=True)]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Whole, of parameters that have one."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in found]


def reduced(rank: int, model: nn.Module, **options: Any) -> list[torch.Tensor]:
    """The gradients of one backward pass with float8 reductions."""
    f8sub.reduce_gradients_in_float8(model, **options)
    backward(model, rank)
    return gradients(model)


def same(found: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """To the bit, zeros of both signs and every NaN apart."""
    assert len(found) == len(right)
    pairs = zip(found, right, strict=True)
    return all(torch.equal(a.nan_to_num(7, 8, 9) + 0.0, b.nan_to_num(7, 8, 9) + 0.0) for a, b in pairs)
