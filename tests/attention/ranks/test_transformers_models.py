"""Llamas of transformers that attend in float8 on ranks: sharded, replicated, with heads apart, with adapters."""

import contextlib
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import f8sub
from tests.attention.test_transformers import IDS, llama
from tests.budgets import decibels
from tests.selection import long_but


def model(recipe: str | None, adapters: bool = False) -> nn.Module:
    made = llama()
    if recipe is not None:
        f8sub.convert_to_float8(made, recipe, min_dim=0, backend="reference")
    f8sub.attend_in_float8(made, backend="reference", min_length=0)
    if adapters:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        names = ["q_proj", "v_proj", "up_proj"]
        made = get_peft_model(made, LoraConfig(r=4, target_modules=names, init_lora_weights=False))
    return made


def layers_of(made: nn.Module) -> Any:
    return next(module for name, module in made.named_modules() if name.endswith("layers"))


def sharded(made: nn.Module, how: str) -> nn.Module:
    world = dist.get_world_size()
    if how == "ddp":
        return DistributedDataParallel(made)
    if how == "replicate":
        from torch.distributed._composable.replicate_with_fsdp import replicate

        apply = functools.partial(replicate, mesh=init_device_mesh("cpu", (world,)))
    elif how == "heads":
        mesh = init_device_mesh("cpu", (world,))
        plan: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        for layer in layers_of(made):
            parallelize_module(layer, mesh, plan | {"self_attn.o_proj": RowwiseParallel()})
        return made
    else:
        names = ("replicas", "shards") if how == "hsdp" else ("shards",)
        shape = (2, world // 2) if how == "hsdp" else (world,)
        apply = functools.partial(fully_shard, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    for layer in layers_of(made):
        apply(layer)
    return apply(made)


def histories(made: nn.Module) -> torch.Tensor:
    return torch.stack([each.state.history.clone() for each in f8sub.conversion_report(made).attention])


def first_micro_batch(made: nn.Module, how: str) -> Any:
    """No gradient is reduced."""
    if how == "ddp":
        return made.no_sync()
    if how in ("fsdp", "hsdp"):
        made.set_requires_gradient_sync(False)
    return contextlib.nullcontext()


def train(made: nn.Module, how: str | None, own: int) -> list[torch.Tensor]:
    """Losses of two steps of two microbatches each, with an evaluation between them, and histories after each."""
    optimizer = torch.optim.SGD([p for p in made.parameters() if p.requires_grad], lr=0.5)
    found = []
    for step in range(2):
        for micro in range(2):
            ids = (IDS + 5 * step + 7 * micro + 11 * own) % 64
            with contextlib.nullcontext() if micro or how is None else first_micro_batch(made, how):
                if micro and how in ("fsdp", "hsdp"):
                    made.set_requires_gradient_sync(True)
                loss = made(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
            found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        f8sub.precompute_scales(made)
        found.append(histories(made))
        before = histories(made)
        with torch.no_grad():
            found.append(made.eval()(input_ids=IDS, labels=IDS, use_cache=False).loss)
        made.train()
        assert torch.equal(histories(made), before)
    return found


WAYS = [(2, "fsdp"), (2, "ddp"), (2, "replicate"), (4, "hsdp"), (2, "heads")]
WITH_LAYERS = [(*way, "rowwise") for way in WAYS]
ALONE = [(*way, None) for way in WAYS]


@pytest.mark.parametrize(
    ("world", "how", "recipe"), long_but([WITH_LAYERS[1], ALONE[0]], [*WITH_LAYERS, *ALONE])
)
def test_with_the_same_tokens_it_is_the_model_of_one_rank(rank, world, how, recipe):
    expected, found = train(model(recipe), None, 0), train(sharded(model(recipe), how), how, 0)
    for a, b in zip(expected, found, strict=True):
        # Ranks with heads of their own have scales of these, and add up products.
        assert torch.equal(a, b) if how != "heads" else decibels(a, b) > 20
    assert all((each > 0).all() for each in found[2][:, :2])


WITH_ADAPTERS = [(*way, adapters) for way in (*WITH_LAYERS[:4], *ALONE[:4]) for adapters in (False, True)]


@pytest.mark.parametrize(
    ("world", "how", "recipe", "adapters"),
    long_but(
        [
            (2, "fsdp", "rowwise", True),
            (2, "ddp", None, True),
            (2, "replicate", None, False),
            (2, "heads", None, False),
        ],
        [*WITH_ADAPTERS, (2, "heads", "rowwise", False), (2, "heads", None, False)],
    ),
)
def test_histories_are_those_of_all_ranks(rank, world, how, recipe, adapters):
    """With adapters no layer that was converted is trained."""
    found = train(sharded(model(recipe, adapters), how), how, 0 if how == "heads" else rank)
    for own in (found[2], found[6]):
        dist.all_reduce(maximum := own.clone(), dist.ReduceOp.MAX)
        assert torch.equal(own, maximum)
