"""fully_shard over NCCL on one GPU: the world of one that the CPU tests have, with streams."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import f8sub
from tests.cuda.products import RECIPES
from tests.cuda.sharded import (
    gathered_bits,
    losses_on_and_off,
    model_on_gpu,
    non_finite,
    offloaded_losses,
    train,
)
from tests.cuda.test_linear import NoSync
from tests.models import BF16, shard

on_each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=RECIPES)


@on_each_recipe
def test_the_gathered_weight_is_the_quantized_one(ranks, recipe):
    for found, expected in ranks(1, gathered_bits, recipe, gpus=True, timeout=120)[0]:
        assert found == expected


@on_each_recipe
def test_losses_with_the_float8_all_gather_and_without(ranks, recipe):
    on, off = ranks(1, losses_on_and_off, recipe, gpus=True, timeout=120)[0]
    assert on == off
    assert on[-1] < on[0]


def test_cpu_offload(ranks):
    offloaded, resident = ranks(1, offloaded_losses, "tensorwise", gpus=True, timeout=120)[0]
    assert offloaded == pytest.approx(resident, rel=1e-3)


@on_each_recipe
def test_a_non_finite_weight_is_reported(ranks, recipe):
    ((poisoned, message),) = ranks(1, non_finite, recipe, gpus=True, timeout=120)
    assert poisoned == [False] * 13 + [True]
    assert "blocks.1.down" in message
    assert "blocks.0" not in message


def steps_without_a_sync(rank: int, world: int, recipe: str, compiled: bool) -> None:
    model = shard(model_on_gpu(recipe), BF16)
    if compiled:
        for block in model.blocks:
            block.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, rank, steps=3)
    with NoSync():
        train(model, optimizer, rank, steps=2, losses=False)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@on_each_recipe
def test_the_host_never_waits(ranks, recipe, compiled):
    ranks(1, steps_without_a_sync, recipe, compiled, gpus=True, timeout=240)


def moved_by_fully_shard(rank: int, world: int) -> tuple[str, list[float]]:
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32)))
    before = model[0].plan.device.type
    fully_shard(model, mp_policy=MixedPrecisionPolicy())
    y = model(torch.randn(8, 32, device="cuda"))
    y.backward(torch.randn_like(y))
    return before, [model[0].plan.device.type, y.device.type]


def test_a_model_converted_on_the_cpu_is_sharded_on_the_gpu(ranks):
    assert ranks(1, moved_by_fully_shard, gpus=True, timeout=120) == [("cpu", ["cuda", "cuda"])]
