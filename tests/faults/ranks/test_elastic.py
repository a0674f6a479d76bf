"""Saved by four ranks, resumed by another number of them: the same codes and histories, bit for bit."""

import math
from pathlib import Path

import pytest
import torch
from f8sub_pretrain.checkpoint import Checkpoints
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import f8sub
from tests.models import equal, float8_layers, replicated, shard, train, transformer
from tests.selection import long_but

CASES = [("mxfp8", 3, 1), ("delayed", 4, 2), ("tensorwise", 2, 1), ("tensorwise", 4, 2), ("delayed", 3, 1)]
CASES += [(recipe, 3, 1) for recipe in ("rowwise", "blockwise", "nvfp4")]
"""Recipe, ranks and replicas."""
STEPS = 2
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def sharded(recipe: str, replicas: int = 1, spread: float = 0.0) -> tuple:
    """A model and its optimizer."""
    model = shard(transformer(recipe, spread=spread), mesh=replicated(replicas))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": value for name, value in get_model_state_dict(model).items()}
    states = get_optimizer_state_dict(model, optimizer, options=FLAT)
    return found | {f"optimizer.{name}": v for name, v in states.items() if isinstance(v, torch.Tensor)}


def what_is_gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Codes and scales of every gathered weight, and every history."""
    found = {name: value.clone() for name, value in model.named_buffers() if "scaling_states" in name}
    for block in model.blocks:
        block.unshard()
    for layer in float8_layers(model):
        rowwise = layer.weight.rowwise
        for index, tensor in enumerate(rowwise.tensors):
            found[f"{layer._f8sub.fqn}.{index}"] = tensor.contiguous().view(torch.uint8).clone()
    for block in model.blocks:
        block.reshard()
    return found


def save(rank: int, world: int, folder: str, recipe: str) -> dict[str, torch.Tensor]:
    model, optimizer = sharded(recipe)
    train(model, rank, steps=STEPS, optimizer=optimizer)
    Checkpoints(Path(folder)).save(STEPS, tensors(model, optimizer), {"step": STEPS})
    return what_is_gathered(model)


def resume(rank: int, world: int, folder: str, recipe: str, replicas: int) -> tuple[dict, bool]:
    """What is gathered after loading over other weights whose scales were in use, and a loss that goes on from it."""
    model, optimizer = sharded(recipe, replicas, spread=2.0)
    train(model, rank, steps=1, optimizer=optimizer)
    filled = tensors(model, optimizer)
    state = Checkpoints(Path(folder)).load(f"step-{STEPS:08d}", filled)
    weights, own = (
        {name.removeprefix(prefix): v for name, v in filled.items() if name.startswith(prefix)}
        for prefix in ("model.", "optimizer.")
    )
    set_model_state_dict(model, weights)
    states = get_optimizer_state_dict(model, optimizer, options=FLAT) | own
    set_optimizer_state_dict(model, optimizer, states, options=FLAT)
    f8sub.precompute_scales(model)
    assert state == {"step": STEPS}
    gathered = what_is_gathered(model)
    (loss,) = train(model, rank, steps=1, optimizer=optimizer)
    return gathered, math.isfinite(loss)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return {}


@pytest.mark.parametrize(("recipe", "world", "replicas"), long_but(CASES[1:2], CASES))
def test_codes_and_histories_are_those_that_were_saved(
    ranks, saved, tmp_path_factory, recipe, world, replicas
):
    if recipe not in saved:
        folder = tmp_path_factory.mktemp(recipe)
        saved[recipe] = folder, ranks(4, save, str(folder), recipe)[0]
    folder, expected = saved[recipe]
    assert any("scaling_states" in name for name in expected) == (recipe == "delayed")
    for found, goes_on in ranks(world, resume, str(folder), recipe, replicas):
        assert equal(found, expected)
        assert goes_on
