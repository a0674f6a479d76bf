"""What the ranks of the sharding tests run, each on a GPU of its own."""

import contextlib
import itertools
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import f8sub
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import fsdp_params, module_of
from f8sub.weights import exchange
from tests.data_sets import gaussian, generator
from tests.kernels.products import bits
from tests.models import BF16, float8_layers, precompute, shard, transformer
from tests.weights.ranks.test_losses import SPREAD, optimizer_of
from tests.weights.ranks.test_reduce_in_place import side_by_side

STEPS, BATCH, WIDTH, CLASSES = 6, 8, 32, 11


def model_on_gpu(recipe: str, *, all_gather: bool = True) -> nn.Module:
    return transformer(recipe, spread=SPREAD, all_gather=all_gather).cuda()


def train(model: nn.Module, optimizer, rank: int, *, steps=STEPS, losses: bool = True) -> list[float]:
    batches = []
    for step in range(steps):
        rng = generator(1000 * step + rank)
        x, target = gaussian((BATCH, 4, WIDTH), rng), torch.randint(CLASSES, (BATCH * 4,), generator=rng)
        batches.append((x.pin_memory().cuda(non_blocking=True), target.pin_memory().cuda(non_blocking=True)))
    found = []
    for x, target in batches:
        precompute(model)
        loss = F.cross_entropy(model(x).flatten(0, 1).float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [loss.item() for loss in found] if losses else []


def gathered_bits(rank: int, world: int, recipe: str) -> list[tuple[list[bytes], list[bytes]]]:
    """Codes and scales of every gathered weight, and of the whole weight quantized."""
    whole = [layer.weight.detach().clone() for layer in float8_layers(model_on_gpu(recipe))]
    model = model_on_gpu(recipe)
    fully_shard(model)
    f8sub.precompute_scales(model)
    model.unshard()
    found = []
    for layer, weight in zip(float8_layers(model), whole, strict=True):
        expected = f8sub.quantize(weight, recipe, operand="w").rowwise
        gathered = layer.weight.rowwise
        both = (gathered, expected)
        found.append(tuple([bits(t).numpy().tobytes() for t in operand.tensors] for operand in both))
    return found


def losses_on_and_off(rank: int, world: int, recipe: str) -> tuple[list[float], list[float]]:
    found = []
    for all_gather in (True, False):
        model = shard(model_on_gpu(recipe, all_gather=all_gather), BF16)
        found.append(train(model, optimizer_of(model.parameters()), rank))
    return tuple(found)


def rounding() -> contextlib.AbstractContextManager:
    """Layers round the gradients of gathered weights to bf16."""
    return mock.patch.object(Float8Tensor, "wgrad_dtype", property(lambda weight: weight.dtype))


def losses_in_place(rank: int, world: int, recipe: str, replayed: bool) -> tuple[list[float], list[float]]:
    """Losses of weights that are gathered where they are read, blocks one ahead, and of those that FSDP2 copies."""
    found = []
    # FSDP2's copies are of gradients in bf16.
    with rounding():
        for in_place in (True, False):
            how = contextlib.nullcontext() if in_place else mock.patch.object(exchange, "gather_in_place")
            with how:
                losses, groups = _losses_of_a_prefetching_model(recipe, replayed, rank)
            assert {hasattr(group._all_gather_comm, "places") for group in groups} == {in_place}
            found.append(losses)
    return tuple(found)


def losses_reduced_in_place(rank: int, world: int, recipe: str, replayed: bool) -> tuple[list[float], ...]:
    """Losses of gradients that are reduced where they lie; copied into one input; and rounded to bf16."""
    found = []
    for how in (contextlib.nullcontext(), side_by_side(), rounding()):
        with how:
            found.append(_losses_of_a_prefetching_model(recipe, replayed, rank)[0])
    return tuple(found)


def _losses_of_a_prefetching_model(recipe: str, replayed: bool, rank: int) -> tuple[list[float], list]:
    """And its groups of parameters."""
    model = shard(model_on_gpu(recipe), BF16)
    for block, following in itertools.pairwise(model.blocks):
        block.set_modules_to_forward_prefetch([following])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    losses = _losses_of_a_graph_step(model, optimizer, rank, warmup=3 if replayed else 10**6)
    modules = set(model.modules())
    return losses, [group for group, param in fsdp_params() if module_of(param) in modules]


def _losses_of_a_graph_step(model: nn.Module, optimizer, rank: int, *, warmup: int) -> list[float]:
    def forward_backward(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1).float(), target)
        loss.backward()
        return loss.detach()

    batches = []
    for number in range(2 * STEPS):
        rng = generator(1000 * number + rank)
        x, target = gaussian((BATCH, 4, WIDTH), rng), torch.randint(CLASSES, (BATCH * 4,), generator=rng)
        batches.append((x.cuda(), target.cuda()))
    step = f8sub.graph_step(forward_backward, model, optimizer, warmup=warmup)
    # The host waits for none of them, so that a gather could meet the step before.
    found = [step(*batch) for batch in batches]
    assert step.how == ("replayed" if warmup == 3 else "launched"), step.why_launched
    step.close()
    return [loss.item() for loss in found]


def offloaded_losses(rank: int, world: int, recipe: str) -> tuple[list[float], list[float]]:
    found = []
    for policy in ({"offload_policy": CPUOffloadPolicy()}, {}):
        model = model_on_gpu(recipe)
        if policy:
            model.cpu()
        shard(model, BF16, **policy)
        found.append(train(model, optimizer_of(model.parameters()), rank))
    return tuple(found)
