"""fully_shard over NCCL on two GPUs: bitwise what one GPU has, one all-reduce a step, half the bytes."""

import pytest
import torch

from tests.cuda.products import RECIPES
from tests.cuda.sharded import (
    all_reduces_of_a_step,
    gathered_bits,
    losses_on_and_off,
    non_finite,
    offloaded_losses,
)
from tests.cuda.test_fsdp import steps_without_a_sync

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
on_each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=RECIPES)


@on_each_recipe
def test_the_gathered_weight_is_the_quantized_one(ranks, recipe):
    for layers in ranks(2, gathered_bits, recipe, gpus=True, timeout=120):
        for found, expected in layers:
            assert found == expected


@on_each_recipe
def test_losses_with_the_float8_all_gather_and_without(ranks, recipe):
    for on, off in ranks(2, losses_on_and_off, recipe, gpus=True, timeout=120):
        assert on == off
        assert on[-1] < on[0]


def test_cpu_offload(ranks):
    for offloaded, resident in ranks(2, offloaded_losses, "tensorwise", gpus=True, timeout=120):
        assert offloaded == pytest.approx(resident, rel=1e-3)


@on_each_recipe
def test_a_non_finite_weight_is_reported_by_every_rank(ranks, recipe):
    for poisoned, message in ranks(2, non_finite, recipe, gpus=True, timeout=120):
        assert poisoned == [False] * 13 + [True]
        assert "blocks.1.down" in message
        assert "blocks.0" not in message


@on_each_recipe
def test_one_all_reduce_a_step(ranks, recipe):
    """``mxfp8`` and ``nvfp4`` have scales of their own rows alone, which need none."""
    assert all(calls <= 3 for calls, _ in ranks(2, all_reduces_of_a_step, recipe, gpus=True, timeout=120))


def test_one_all_reduce_a_step_of_one_scale_a_tensor(ranks):
    assert [calls for calls, _ in ranks(2, all_reduces_of_a_step, "tensorwise", gpus=True, timeout=120)] == [
        3,
        3,
    ]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@on_each_recipe
def test_the_host_never_waits(ranks, recipe, compiled):
    ranks(2, steps_without_a_sync, recipe, compiled, gpus=True, timeout=240)
