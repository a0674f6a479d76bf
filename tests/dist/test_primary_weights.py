"""Float8 primary weights under FSDP2: the losses of high-precision weights, bit for bit, and what is kept of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import f8sub
from f8sub.tensor.primary_weight import PrimaryWeight
from tests.data_sets import gaussian, generator
from tests.dist.models import BF16, Stack, Transformer, float8_layers, seed_weights, shard
from tests.dist.wire import Wire

STEPS, WIDTH, CLASSES, SPREAD = 20, 32, 11, 4.0
RECIPES = f8sub.recipe_names()
POLICIES = {"fp32": None, "bf16": BF16}
on_each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=RECIPES)


def made(recipe: str, primary: bool, dtype: torch.dtype = torch.float32, hidden: int = 48) -> nn.Module:
    model = seed_weights(Transformer(hidden=hidden, blocks=1), SPREAD).to(dtype)
    return f8sub.convert_to_float8(model, recipe=recipe, primary_weights=primary)


def optimizer_of(model: nn.Module, masters: bool) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    return f8sub.optim.MasterWeights(optimizer) if masters else optimizer


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    rng = generator(1000 * step + rank)
    x, target = gaussian((8, 4, WIDTH), rng), torch.randint(CLASSES, (32,), generator=rng)
    dtype = next(model.parameters()).dtype
    return F.cross_entropy(model(x.to(dtype)).flatten(0, 1).float(), target)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        f8sub.precompute_scales(model)
        loss = loss_of(model, step, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def with_and_without(
    rank: int, world: int, recipe: str, policy: str, dtype: torch.dtype
) -> list[tuple[list[float], list[torch.Tensor]]]:
    results = []
    for primary in (True, False):
        # 50 rows: shards that FSDP2 pads, and tiles that lie in two of them.
        model = shard(made(recipe, primary, dtype, hidden=50), POLICIES[policy])
        optimizer = optimizer_of(model, masters=primary or dtype != torch.float32)
        losses = trained(model, optimizer, rank, range(STEPS))
        kinds = {type(layer.weight.to_local()) for layer in float8_layers(model)}
        assert all(issubclass(kind, PrimaryWeight) == primary for kind in kinds)
        results.append((losses, [p.full_tensor().detach() for p in model.parameters()]))
    return results


DTYPES = {"fp32": (torch.float32, "fp32"), "fp32-policy-bf16": (torch.float32, "bf16"), "bf16": (torch.bfloat16, "fp32")}
CASES = [
    *((recipe, "fp32-policy-bf16", 3) for recipe in RECIPES),
    *((RECIPES[-1], dtypes, world) for dtypes in ("fp32", "bf16") for world in (1, 2, 3)),
]


@pytest.mark.parametrize(("recipe", "dtypes", "world"), CASES, ids=[f"{r}-{d}-world{w}" for r, d, w in CASES])
def test_losses_are_those_of_high_precision_weights(ranks, recipe, dtypes, world):
    """Of float32 weights, and of bf16 weights with float32 masters."""
    dtype, policy = DTYPES[dtypes]
    for (losses, weights), (expected, expected_weights) in ranks(
        world, with_and_without, recipe, policy, dtype
    ):
        assert losses == expected
        assert all(torch.equal(a, b) for a, b in zip(weights, expected_weights, strict=True))
        assert len(set(losses)) == STEPS


def counted(rank: int, world: int, recipe: str, primary: bool) -> tuple[int, int]:
    model = shard(f8sub.convert_to_float8(seed_weights(Stack(64, 96, 32)), recipe, primary_weights=primary))
    optimizer = optimizer_of(model, masters=primary)
    x = gaussian((8, 64), generator(rank))
    f8sub.precompute_scales(model)
    for _ in range(2):
        with Wire() as wire:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            f8sub.precompute_scales(model)
    return wire.all_reduces, wire.gathered


@on_each_recipe
def test_a_step_reduces_once_and_gathers_what_high_precision_weights_do(ranks, recipe):
    found, expected = ranks(2, counted, recipe, True), ranks(2, counted, recipe, False)
    assert found == expected
    assert [all_reduces for all_reduces, _ in found] == [1, 1]
