"""Each way of running FSDP2 gives the same losses with the float8 all-gather as without it, bit for bit."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import BF16, transformer
from tests.selection import long_but
from tests.wires import ONE_RECIPE_A_WIRE

RECIPES = (*ONE_RECIPE_A_WIRE, "delayed")
STEPS = 3
Shard = Callable[[nn.Module], nn.Module]


def with_options(**options) -> Shard:
    def shard(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            fully_shard(block, **options)
        return fully_shard(model, **options)

    return shard


def root_alone(model: nn.Module) -> nn.Module:
    return fully_shard(model, mp_policy=BF16)


def two_blocks_in_one_group(model: nn.Module) -> nn.Module:
    fully_shard(list(model.blocks))
    return fully_shard(model)


def checkpointed(model: nn.Module) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return with_options()(model)


def prefetching(model: nn.Module) -> nn.Module:
    model = with_options()(model)
    model.set_modules_to_forward_prefetch([model.blocks[0]])
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
    return model


def on_two_meshes(model: nn.Module) -> nn.Module:
    """One block over all ranks, the other over pairs: two tables of scales."""
    flat = init_device_mesh("cpu", (4,))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model.blocks[0], mesh=flat)
    fully_shard(model.blocks[1], mesh=pairs)
    return fully_shard(model, mesh=flat)


def frozen_first_block(model: nn.Module) -> nn.Module:
    model.blocks[0].requires_grad_(False)
    return with_options()(model)


MODES: dict[str, Shard] = {
    "bf16": with_options(mp_policy=BF16),
    "reshard-never": with_options(reshard_after_forward=False),
    "root-alone": root_alone,
    "one-group": two_blocks_in_one_group,
    "checkpointed": checkpointed,
    "prefetching": prefetching,
    "offloaded": with_options(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "frozen": frozen_first_block,
}


def parameter_groups(model: nn.Module) -> list[list[nn.Parameter]]:
    """Parameters of one mesh each: gradient norms of two meshes cannot be stacked."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(parameter.device_mesh, []).append(parameter)
    return list(groups.values())


def train(model: nn.Module, rank: int, microbatches: int) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    f8sub.precompute_scales(model)
    for step in range(STEPS):
        for micro in range(microbatches):
            last = micro == microbatches - 1
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            rng = generator(100 * step + 10 * micro + rank)
            logits = model(gaussian((4, 4, 32), rng)).flatten(0, 1).float()
            loss = F.cross_entropy(logits, torch.randint(11, (16,), generator=rng))
            loss.backward()
            losses.append(loss.item())
        for group in parameter_groups(model):
            torch.nn.utils.clip_grad_norm_(group, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        f8sub.precompute_scales(model)
        with torch.no_grad():
            losses.append(model(gaussian((2, 4, 32), generator(step))).float().sum().item())
    return losses


def on_and_off(
    rank: int, world: int, recipe: str, shard: str, microbatches: int
) -> tuple[list[float], list[float]]:
    how = on_two_meshes if shard == "two-meshes" else MODES[shard]
    return tuple(
        train(how(transformer(recipe, spread=2.0, all_gather=all_gather)), rank, microbatches)
        for all_gather in (True, False)
    )


CASES = [("tensorwise", mode) for mode in MODES] + [("mxfp8", "offloaded"), ("delayed", "bf16")]
MORE = [(recipe, mode) for recipe in RECIPES for mode in ("bf16", "prefetching", "offloaded", "frozen")]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("recipe", "mode"), long_but(CASES, dict.fromkeys(CASES + MORE)))
def test_on_is_off(ranks, recipe, mode):
    for on, off in ranks(2, on_and_off, recipe, mode, 2):
        assert on == off
        assert len(set(on)) == len(on)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_on_is_off_on_two_meshes(ranks, recipe):
    for on, off in ranks(4, on_and_off, recipe, "two-meshes", 2):
        assert on == off
