"""torch's ``replicate``, DDP made of FSDP2: it trains as DistributedDataParallel does, bit for bit."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import Stack, seed_weights
from tests.wire import Wire

STEPS = 3


def by_replicate(model: nn.Module) -> nn.Module:
    for layer in model.layers:
        replicate(layer)
    return replicate(model)


def made(recipe: str, **options) -> nn.Module:
    return f8sub.convert_to_float8(seed_weights(Stack(64, 48, 32)), recipe, skip_defaults=False, **options)


def trained(rank: int, model: nn.Module, optimizer, precompute: bool = True) -> list[torch.Tensor]:
    results = []
    for i in range(STEPS):
        if precompute:
            f8sub.precompute_scales(model)
        y = model(gaussian((16, 64), generator(10 * i + rank)))
        y.backward(gaussian(tuple(y.shape), generator(10 * i + rank + 5)))
        optimizer.step()
        optimizer.zero_grad()
        results.append(y.detach())
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return [*results, *(p.detach() for p in whole)]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("precompute", [True, False], ids=["precomputed", "not precomputed"])
@pytest.mark.parametrize("gathers", [True, False], ids=["float8", "high precision"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8", "delayed"])
def test_it_is_ddp(rank, world, recipe, gathers, precompute):
    model = by_replicate(made(recipe, float8_all_gather=gathers))
    expected = DistributedDataParallel(made(recipe))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", f8sub.Float8Warning)  # precompute_scales was not called
        found = trained(rank, model, adam(model), precompute)
        wanted = trained(rank, expected, adam(expected), precompute)
    assert all(map(torch.equal, found, wanted))


def test_primary_weights(rank, world):
    model, expected = by_replicate(made("rowwise", primary_weights=True)), by_replicate(made("rowwise"))
    found = trained(rank, model, f8sub.optim.MasterWeights(adam(model)))
    assert all(map(torch.equal, found, trained(rank, expected, adam(expected))))


def test_current_scales_are_reduced_over_no_ranks(rank, world):
    model = by_replicate(made("rowwise"))
    trained(rank, model, adam(model))
    with Wire() as wire:
        f8sub.precompute_scales(model)
        with torch.no_grad():
            model(gaussian((16, 64), generator(1)))
    assert wire.all_reduces == 0
