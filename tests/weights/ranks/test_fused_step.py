"""Amaxes that the optimizer's step found: those of the weights as they are, of each weight that nobody wrote to since.

The kernels are interpreted, in ranks that were forked before anything imported triton.
"""

import importlib
import sys

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import f8sub
from tests.data_sets import generator
from tests.kernels import interpreted
from tests.kernels.interpreted import needs_triton
from tests.models import Stack, seed_weights, shard_of
from tests.selection import long_but


def sharded(recipe: str) -> nn.Module:
    model = f8sub.convert_to_float8(seed_weights(Stack(96, 304, 160, 48)).bfloat16(), recipe=recipe)
    model.layers[1].float()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, fused=None) -> list[str]:
    """One step with gradients that all ranks draw; returns the kernels of the step and of its scales."""
    for number, parameter in enumerate(model.parameters()):
        local = parameter.to_local()
        drawn = torch.randn(local.shape, generator=generator(10 * seed + number)).to(local)
        parameter.grad = type(parameter).from_local(
            drawn,
            parameter.device_mesh,
            parameter.placements,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    with interpreted.launched() as names:
        if fused is None:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            gradients = [parameter.grad for parameter in model.parameters()]
            right = nn.utils.get_total_norm(gradients).full_tensor().float()
            torch.testing.assert_close(fused.clip_grad_norm_(1.0), right, rtol=1e-2, atol=0)
        optimizer.step()
        f8sub.precompute_scales(model)
    return names


def scales_of(model: nn.Module) -> list[torch.Tensor]:
    """Amaxes and scales of each table, reduced."""
    found = []
    for exchange in model.layers[0]._f8sub.conversion.exchanges.values():
        exchange.settle()
        found += [exchange.table.amax.clone(), exchange.table._scale.clone()]
    return found


def check_amaxes(model: nn.Module) -> None:
    """Of weights with one scale: the largest magnitude on any rank."""
    for layer in model.layers:
        shard = shard_of(layer)
        shard.exchange.settle()
        if shard.wire.table_tile.is_whole:
            assert shard.scales.amax.item() == layer.weight.full_tensor().abs().max().item()


@needs_triton
@pytest.mark.own_ranks  # triton is imported anew, which goes well once in a process
@pytest.mark.parametrize(
    ("recipe", "world"), long_but([("tensorwise", 2)], [("tensorwise", 2), ("blockwise", 2), ("rowwise", 1)])
)
def test_amaxes_are_of_the_weights_as_they_are(rank, world, recipe):
    for name in list(sys.modules):
        if name.startswith(("triton", "f8sub.kernels.triton.")) and not name.startswith("triton._C"):
            del sys.modules[name]
    interpreted._start()
    importlib.import_module("f8sub.kernels.triton.launch")  # or it is what another file of tests imported
    models = [sharded(recipe) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) for model in models]
    fused = f8sub.optim.fuse_step(optimizers[0])
    for model in models:
        f8sub.precompute_scales(model)
    reads = {"tensorwise": 0}.get(recipe, 1)
    for seed in range(2):
        names = step(models[0], optimizers[0], seed, fused)
        assert fused.why_torch is None
        assert names.count("step_many") >= 1
        assert (names.count("amaxes_of_many") > 0) == bool(reads)
        step(models[1], optimizers[1], seed)
        check_amaxes(models[0])
        for mine, right in zip(*map(scales_of, models), strict=True):
            torch.testing.assert_close(mine, right, rtol=2e-2, atol=0)
    for mine, right in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(mine.to_local(), right.to_local(), rtol=2e-2, atol=2e-4)
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    check_writes_after(models[0], optimizers[0], fused)


def check_writes_after(model: nn.Module, optimizer: torch.optim.Optimizer, fused) -> None:
    """A weight that was written to after the step is read again, and so is one that a state dict shares."""
    with torch.no_grad():
        handle = optimizer.register_step_post_hook(lambda *args: model.layers[1].weight.mul_(3.0))
        names = step(model, optimizer, 7, fused)
        handle.remove()
    assert names.count("amaxes_of_many") >= 1
    check_amaxes(model)
    names = step(model, optimizer, 8, fused)
    check_amaxes(model)
    state = model.state_dict()
    with torch.no_grad():
        handle = optimizer.register_step_post_hook(
            lambda *args: [value.to_local().mul_(2.0) for value in state.values()]
        )
        names = step(model, optimizer, 9, fused)
        handle.remove()
    assert names.count("amaxes_of_many") >= 1
    check_amaxes(model)
