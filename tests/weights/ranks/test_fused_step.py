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
from f8sub.experts.module import Float8Experts
from f8sub.weights import amax_table
from tests.data_sets import generator
from tests.experts.models import OwnExperts
from tests.graphs import tape
from tests.kernels import interpreted
from tests.kernels.interpreted import needs_triton
from tests.models import Stack, replicated, seed_weights, shard_of
from tests.selection import long_but


def interpret() -> None:
    """Import triton anew, interpreted."""
    for name in list(sys.modules):
        if name.startswith(("triton", "f8sub.kernels.triton.")) and not name.startswith("triton._C"):
            del sys.modules[name]
    interpreted._start()
    importlib.import_module("f8sub.kernels.triton.launch")  # or it is what another file of tests imported


def sharded(recipe: str, widths: tuple[int, ...] = (96, 304, 160, 48), replicas: int = 1) -> nn.Module:
    model = f8sub.convert_to_float8(
        seed_weights(Stack(*widths)).bfloat16(), recipe=recipe, skip_defaults=False
    )
    model.layers[1].float()
    mesh = replicated(replicas)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
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
    ("recipe", "world", "replicas"),
    long_but(
        [("tensorwise", 2, 1)],
        [("tensorwise", 2, 1), ("tensorwise", 2, 2), ("blockwise", 2, 1), ("rowwise", 1, 1)],
    ),
)
def test_amaxes_are_of_the_weights_as_they_are(rank, world, recipe, replicas):
    interpret()
    models = [sharded(recipe, replicas=replicas) for _ in range(2)]
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


class Mixture(nn.Module):
    """A linear layer, and experts whose matrices are of several programs of the step, or of less than one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64), OwnExperts(5, 64, 32), OwnExperts(5, 48, 16)])


@needs_triton
@pytest.mark.own_ranks
@pytest.mark.parametrize("world", long_but([2], [2, 3]))
def test_experts_have_amaxes_of_their_own(rank, world):
    """Found by the step where an expert is of whole programs, and by one launch after it else."""
    interpret()
    f8sub.register_experts(OwnExperts)
    torch.manual_seed(0)
    model = f8sub.convert_to_float8(Mixture(), experts=True, skip_defaults=False)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    fused = f8sub.optim.fuse_step(optimizer)
    f8sub.precompute_scales(model)
    experts = [module for module in model.modules() if isinstance(module, Float8Experts)]

    def check(names: list[str], reads: int) -> None:
        assert names.count("amaxes_of_many") == reads
        for module in experts:
            for name, parameter in module.named_parameters():
                conversion = module._f8sub.conversion
                shard = conversion.shard_of(conversion.record_of(module, name))
                shard.exchange.settle()
                right = parameter.full_tensor().flatten(1).abs().amax(1)
                assert torch.equal(shard.scales.amax.flatten(), right), name

    for seed in range(2):
        names = step(model, optimizer, seed, fused)
        assert fused.why_torch is None
        check(names, 1)
    with torch.no_grad():
        handle = optimizer.register_step_post_hook(lambda *args: experts[0].up.mul_(3.0))
        names = step(model, optimizer, 2, fused)
        handle.remove()
    check(names, 1)


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


def scaled(model: nn.Module) -> None:
    """In place, by an operator of its own."""
    with torch.no_grad():
        model.layers[1].weight.mul_(3.0)


def loaded(model: nn.Module) -> None:
    """Through plain tensors, of one weight on one rank alone, and of others on all."""
    state = model.state_dict()
    for name, value in state.items():
        if name != "layers.0.weight" or torch.distributed.get_rank() == 0:
            value.to_local().mul_(0.5)


def stepped(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    for parameter in model.parameters():
        parameter.grad = None


CHANGES = {4: scaled, 5: scaled, 6: loaded, 7: f8sub.precompute_scales, 8: stepped, 10: loaded}
"""Before these steps."""


def steps_of(
    recipe: str, imitated: bool, warmup: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[str]]:
    """Scales and norms of steps, the last weights, and what each step was."""
    model = sharded(recipe, (32, 48, 80, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    fused = f8sub.optim.fuse_step(optimizer)
    f8sub.precompute_scales(model)

    def function(batch: torch.Tensor) -> torch.Tensor:
        """Gradients that depend on the batch; returns the scales that a forward would read, and the norm."""
        for layer in model.layers:
            shard_of(layer).exchange.settle()  # as an all-gather does
        scales = [shard_of(layer).scales.scale.flatten().clone() for layer in model.layers]
        for parameter in model.parameters():
            local = parameter.to_local()
            drawn = (batch[: local.numel()].view(local.shape) - 0.3).to(local.dtype)
            parameter.grad = type(parameter).from_local(
                drawn,
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        return torch.cat([*scales, fused.clip_grad_norm_(1.0)[None]])

    found, how, reads = [], [], {}
    with pytest.MonkeyPatch.context() as patch:
        if imitated:
            tape.imitate(patch)
            read = amax_table._amaxes_of

            def noted(shards):
                reads.setdefault(index, set()).update(shard.fqn for shard in shards)
                return read(shards)

            patch.setattr(amax_table, "_amaxes_of", noted)
        step = f8sub.graph_step(function, model, optimizer, warmup=warmup)
        for index in range(12):
            CHANGES.get(index, lambda model: None)(model)
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + index)
            right = [layer.weight.full_tensor().abs().max() for layer in model.layers]
            found.append(step(torch.rand(4000, generator=generator(index))).clone())
            for layer, amax in zip(model.layers, right, strict=True):
                if recipe == "tensorwise":
                    assert shard_of(layer).scales.amax.item() == amax.item()
            how.append(step.how)
    assert fused.why_torch is None
    if recipe == "tensorwise":
        assert reads.keys() <= CHANGES.keys()
        # Some of the weights were written to between replays, and those are read.
        assert reads.get(5) == ({"layers.1"} if imitated else None)
    return found, [parameter.full_tensor() for parameter in model.parameters()], how


@needs_triton
@pytest.mark.own_ranks
@pytest.mark.parametrize(
    ("recipe", "world", "warmup"),
    long_but([("tensorwise", 2, 3)], [("tensorwise", 2, 3), ("blockwise", 2, 1), ("tensorwise", 1, 1)]),
)
def test_replays_take_what_the_step_before_found(rank, world, recipe, warmup):
    """No weight is read that has one scale, but those that were written to between two replays."""
    interpret()
    launched, weights, _ = steps_of(recipe, False, 10**6)
    replayed, others, how = steps_of(recipe, True, warmup)
    assert how == ["launched"] * warmup + ["captured"] + ["replayed"] * (11 - warmup)
    assert tape.kernels.count("step_many") >= 1
    assert ("amaxes_of_many" in tape.kernels) == (recipe != "tensorwise")
    for one, other in zip([*launched, *weights], [*replayed, *others], strict=True):
        assert torch.equal(one, other)
