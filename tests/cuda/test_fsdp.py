"""fully_shard over NCCL on one GPU and on two: bitwise what is not sharded, one all-reduce a step, half the bytes."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import f8sub
from tests.compiling import compile_blocks
from tests.cuda import sharded
from tests.cuda.test_linear import NoSync
from tests.layers import on_each_recipe
from tests.models import BF16, shard


@pytest.fixture(params=[1, 2], ids=["one", "two"])
def on_gpus(request, ranks) -> Callable[..., list[Any]]:
    """``on_gpus(body, *args)`` on one GPU, and on two where there are two."""
    if torch.cuda.device_count() < request.param:
        pytest.skip("needs two CUDA devices")
    return functools.partial(ranks, request.param, gpus=True, timeout=240)


@on_each_recipe
def test_the_gathered_weight_is_the_quantized_one(on_gpus, recipe):
    for layers in on_gpus(sharded.gathered_bits, recipe):
        for found, expected in layers:
            assert found == expected


@on_each_recipe
def test_losses_with_the_float8_all_gather_and_without(on_gpus, recipe):
    for on, off in on_gpus(sharded.losses_on_and_off, recipe):
        assert on == off
        assert on[-1] < on[0]


@pytest.mark.parametrize("replayed", [False, True], ids=["launched", "replayed"])
@on_each_recipe
def test_gathers_in_place(on_gpus, recipe, replayed):
    for in_place, copied in on_gpus(sharded.losses_in_place, recipe, replayed):
        assert in_place == copied


@pytest.mark.parametrize("replayed", [False, True], ids=["launched", "replayed"])
@on_each_recipe
def test_reductions_in_place(on_gpus, recipe, replayed):
    found = on_gpus(sharded.losses_reduced_in_place, recipe, replayed)
    for in_place, copied, rounded in found:
        assert in_place == copied
        # One rank reduces nothing, and products in high precision are as rounded as ever.
        assert (in_place == rounded) == (len(found) == 1 or f8sub.get_recipe(recipe).wgrad.a is None)
        assert in_place == pytest.approx(rounded, rel=2e-2)


def test_cpu_offload(on_gpus):
    for offloaded, resident in on_gpus(sharded.offloaded_losses, "tensorwise"):
        assert offloaded == pytest.approx(resident, rel=1e-3)


def steps_without_a_sync(rank: int, world: int, recipe: str, compiled: bool) -> None:
    model = shard(sharded.model_on_gpu(recipe), BF16)
    if compiled:
        compile_blocks(model, "inductor")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sharded.train(model, optimizer, rank, steps=3)
    with NoSync():
        sharded.train(model, optimizer, rank, steps=2, losses=False)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@on_each_recipe
def test_the_host_never_waits(on_gpus, recipe, compiled):
    on_gpus(steps_without_a_sync, recipe, compiled)


def guarded_steps(rank: int, world: int) -> tuple[int, bool]:
    """Steps skipped, and whether the bad one left every weight and state as it was."""
    model = shard(sharded.model_on_gpu("tensorwise"), BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    guard = f8sub.skip_step_if_nonfinite(optimizer)
    sharded.train(model, optimizer, rank, steps=3)
    with NoSync():
        sharded.train(model, optimizer, rank, steps=2, losses=False)
    tensors = [p.to_local() for p in model.parameters()]
    tensors += [getattr(v, "_local_tensor", v) for state in optimizer.state.values() for v in state.values()]
    before = [tensor.clone() for tensor in tensors]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    with NoSync():
        optimizer.step()
    return int(guard.skipped), all(map(torch.equal, tensors, before))


def test_the_step_guard_decides_on_the_device_and_a_bad_step_changes_nothing(on_gpus):
    assert set(on_gpus(guarded_steps)) == {(1, True)}
