"""Float8 primary weights under FSDP2: the losses of high-precision weights, bit for bit, and what is kept of them."""

import gc
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.multiprocessing.reductions import StorageWeakRef

import f8sub
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.primary_weight import PrimaryWeight
from tests.data_sets import gaussian, generator
from tests.models import (
    BF16,
    Stack,
    Transformer,
    equal,
    float8_layers,
    loss_of,
    replicated,
    seed_weights,
    shard,
    shard_of,
    silenced,
    train,
    update,
)
from tests.selection import long_but
from tests.wire import Wire, on_each

STEPS, SPREAD = 10, 4.0
RECIPES = [name for name in f8sub.recipe_names() if f8sub.get_recipe(name).delayed is None]
on_each_recipe = on_each(RECIPES)
FROZEN = [("tensorwise", torch.bfloat16), ("tensorwise", torch.float32)]
FROZEN += [(recipe, torch.bfloat16) for recipe in RECIPES if recipe != "tensorwise"]


def made(recipe: str, primary: bool, dtype: torch.dtype = torch.float32, hidden: int = 48) -> nn.Module:
    model = seed_weights(Transformer(hidden=hidden, blocks=1), SPREAD).to(dtype)
    return f8sub.convert_to_float8(model, recipe=recipe, primary_weights=primary)


def optimizer_of(model: nn.Module, masters: bool) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    return f8sub.optim.MasterWeights(optimizer) if masters else optimizer


def shard_in(mode: str, model: nn.Module, policy: MixedPrecisionPolicy | None) -> nn.Module:
    if mode == "CPU offload":
        return shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    if mode == "HSDP":
        return shard(model, mesh=replicated(2))
    if mode == "columns":
        return shard(model, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)
    if mode == "activation checkpointing":
        model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    return shard(model, policy)


DTYPES = {
    "fp32": (torch.float32, None),
    "fp32-policy-bf16": (torch.float32, BF16),
    "bf16": (torch.bfloat16, None),
}
MODES = ("CPU offload", "HSDP", "columns", "activation checkpointing")
QUICK = [("tensorwise", "fp32-policy-bf16", 3, "usual"), (RECIPES[-1], "bf16", 2, "usual")]
CASES = [
    *QUICK,
    *(("tensorwise", "fp32", 4 if mode == "HSDP" else 2, mode) for mode in MODES),
    *((recipe, "fp32-policy-bf16", 3, "usual") for recipe in RECIPES),
    *((RECIPES[-1], *rest, "usual") for rest in (("fp32", 1), ("fp32", 3), ("bf16", 3))),
]


@pytest.mark.parametrize(("recipe", "dtypes", "world", "mode"), long_but(QUICK, dict.fromkeys(CASES)))
def test_losses_are_those_of_high_precision_weights(rank, world, recipe, dtypes, mode):
    """Of float32 weights, and of bf16 weights with float32 masters."""
    steps = STEPS if recipe == RECIPES[-1] else 5
    results, (dtype, policy) = [], DTYPES[dtypes]
    for primary in (True, False):
        # 80 rows on 3 ranks: shards that FSDP2 pads, and tiles that lie in two of them.
        model = shard_in(mode, made(recipe, primary, dtype, hidden=80), policy)
        optimizer = optimizer_of(model, masters=primary or dtype != torch.float32)
        losses = train(model, rank, steps=steps, optimizer=optimizer)
        kinds = {type(layer.weight.to_local()) for layer in float8_layers(model)}
        assert all(issubclass(kind, PrimaryWeight) == primary for kind in kinds)
        results.append((losses, [p.full_tensor().detach() for p in model.parameters()]))
    found, expected = results
    assert equal(found, expected)
    assert len(set(found[0])) == steps


def counted(rank: int, recipe: str, primary: bool) -> tuple[int, int]:
    model = shard(f8sub.convert_to_float8(seed_weights(Stack(64, 96, 32)), recipe, primary_weights=primary))
    optimizer = optimizer_of(model, masters=primary)
    x = gaussian((8, 64), generator(rank))
    f8sub.precompute_scales(model)
    for _ in range(2):
        with Wire() as wire:
            model(x).square().mean().backward()
            update(model, optimizer)
    return wire.all_reduces, wire.gathered


@on_each_recipe
def test_a_step_reduces_once_and_gathers_what_high_precision_weights_do(rank, world, recipe):
    found = counted(rank, recipe, primary=True)
    assert found == counted(rank, recipe, primary=False)
    assert found[0] == 1


def prepared(rank: int, recipe: str, dtype: torch.dtype, steps: range) -> tuple:
    """A model and its optimizer, after these steps."""
    model = shard(made(recipe, True, dtype, hidden=80))
    optimizer = optimizer_of(model, masters=True)
    train(model, rank, start=steps.start, steps=len(steps), optimizer=optimizer)
    return model, optimizer


def saved_and_trained_on(rank: int, world: int, recipe: str, dtype: torch.dtype, folder: str) -> dict:
    model, optimizer = prepared(rank, recipe, dtype, range(2))
    weights, states = get_state_dict(model, optimizer)
    for entries in states["state"].values():
        kinds = [type(value.to_local()) for value in entries.values() if value.dim()]
        assert all(kind is torch.Tensor or issubclass(kind, MasterWeight) for kind in kinds)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    return {"losses": train(model, rank, start=2, steps=3, optimizer=optimizer)}


def resumed(rank: int, world: int, recipe: str, dtype: torch.dtype, folder: str) -> dict:
    """Into a model with other weights, whose optimizer has not stepped or has."""
    losses = []
    for steps in (range(0), range(7, 9)):
        model, optimizer = prepared(rank, recipe, dtype, steps)
        with torch.no_grad():
            for layer in float8_layers(model):
                layer.weight.mul_(3.0)
        weights, states = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        masters = [state["master"].full_tensor() for state in optimizer.state.values() if "master" in state]
        losses.append(train(model, rank, start=2, steps=3, optimizer=optimizer))
    return {"losses": losses[0], "again": losses[1], "masters": masters}


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16], ids=str
)
def test_resumed_losses_are_bitwise_the_same_and_checkpoints_reshard(ranks, dtype, tmp_path):
    recipe, folder = "rowwise", str(tmp_path)
    expected = ranks(3, saved_and_trained_on, recipe, dtype, folder)
    found = ranks(3, resumed, recipe, dtype, folder)
    assert [r["losses"] for r in found] == [r["losses"] for r in expected]
    assert [r["again"] for r in found] == [r["losses"] for r in expected]
    masters = ranks(2, resumed, recipe, dtype, folder)[0]["masters"]
    assert equal(masters, found[0]["masters"])
    assert len(masters) == (7 if dtype == torch.float32 else 16)


@pytest.mark.parametrize("world", [3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_masters_may_be_taken_after_a_forward_and_no_weight_is_kept_twice(rank, world, dtype):
    """MasterWeights after a first evaluation, which FSDP2's lazy initialization comes with."""
    losses = []
    for late in (True, False):
        model = shard(made("tensorwise", True, dtype, hidden=80))
        optimizer = optimizer_of(model, masters=False)
        if late:
            with torch.no_grad():
                loss_of(model, 0, rank)
        before = [StorageWeakRef(layer.weight.to_local().untyped_storage()) for layer in float8_layers(model)]
        optimizer = f8sub.optim.MasterWeights(optimizer)
        freed = [storage.expired() for storage in before]
        with silenced():
            losses.append(train(model, rank, steps=3, optimizer=optimizer))
    assert losses[0] == losses[1]
    # Float32 values became the master where they were.
    assert all(freed) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("world", [3])
@pytest.mark.parametrize(("recipe", "dtype"), long_but(FROZEN[:1], FROZEN), ids=str)
def test_frozen_weights_keep_their_codes_alone_and_change_nothing(rank, world, recipe, dtype):
    """The first weights frozen and dropped: the same losses as with high-precision weights, also frozen."""
    losses, weights = [], []
    for primary in (True, False):
        model = made(recipe, primary, dtype, hidden=80)
        frozen = float8_layers(model)[:4]
        for layer in frozen:
            layer.weight.requires_grad_(False)
        shard(model)
        held = [StorageWeakRef(layer.weight.to_local().untyped_storage()) for layer in frozen]
        optimizer = optimizer_of(model, masters=primary or dtype == torch.bfloat16)
        if primary:
            f8sub.drop_high_precision(model)
        losses.append(train(model, rank, steps=4, optimizer=optimizer))
        assert not primary or all(storage.expired() for storage in held)
        weights.append([layer.weight.full_tensor() for layer in frozen])
    assert losses[0] == losses[1]
    assert equal(weights[0], [f8sub.quantize(w, recipe, operand="w").dequantize() for w in weights[1]])


@on_each_recipe
def test_masters_that_are_dropped_after_training_change_nothing(rank, world, recipe):
    """Losses before and after masters are dropped; all-reduces; whether codes are tensors of inference mode."""
    model = shard(made(recipe, primary=True))
    train(model, rank, steps=3, optimizer=optimizer_of(model, masters=True))
    f8sub.precompute_scales(model)
    losses = [loss_of(model, 0, rank).item()]
    model.requires_grad_(False)
    f8sub.drop_high_precision(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    with Wire() as wire, torch.inference_mode():
        losses.append(loss_of(model, 0, rank).item())
    losses.append(loss_of(model, 0, rank).item())
    assert not any(shard_of(layer).cast(layer.weight).is_inference() for layer in float8_layers(model))
    assert (len(set(losses)), wire.all_reduces) == (1, 0)


def test_masters_that_are_dropped_before_sharding_are_refused(rank, world):
    model = f8sub.convert_to_float8(Stack(32, 32), primary_weights=True)
    f8sub.drop_high_precision(model.requires_grad_(False))
    with pytest.raises(f8sub.Float8ConfigError, match="drop_high_precision after fully_shard"):
        fully_shard(model)


@pytest.mark.parametrize("world", [1])
def test_sharded_values_are_not_restored(rank, world):
    model = f8sub.convert_to_float8(Stack(32, 32), primary_weights=True)
    fully_shard(model.requires_grad_(False))
    with pytest.raises(f8sub.Float8ConfigError, match="found no weight whose values drop_high_precision"):
        f8sub.restore_high_precision(model)
    f8sub.drop_high_precision(model)
    model(gaussian((8, 32), generator(1)))
    model.reshard()
    told = "layers.0: its weight is sharded; load the adapters into a model that is not, and merge there"
    with pytest.raises(f8sub.Float8ConfigError, match=told):
        f8sub.restore_high_precision(model)


GATHERED = {
    "an evaluation": lambda model, x: model(x),
    "unshard": lambda model, x: model.unshard(),
    "an inner unit": lambda model, x: model[1].unshard(),
}
"""How FSDP2 comes to have weights gathered."""


class OfExperts(nn.Module):
    """Experts, of which all tokens go to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(gaussian((2, 32, 32), generator(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return f8sub.grouped_linear(x, self.up, torch.tensor([len(x), len(x)], device=x.device))


f8sub.register_experts(OfExperts)


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize("how", GATHERED)
@pytest.mark.parametrize("part", ["the model", "a layer"])
def test_weights_that_fsdp2_keeps_gathered_are_dropped_and_not_restored(rank, world, how, part):
    layers = seed_weights(nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32)), OfExperts()))
    model = f8sub.convert_to_float8(
        layers, "rowwise", primary_weights=True, experts=True, skip_defaults=False
    ).requires_grad_(False)
    fully_shard(model[1])
    fully_shard(model)
    x, names = gaussian((8, 32), generator(rank)), ["0.weight", "1.0.weight", "2.up"]
    expected = model(x)
    model.reshard()
    values = [model.get_parameter(name).full_tensor() for name in names]
    GATHERED[how](model, x)
    # A layer has no ``fully_shard`` of its own: a module above it gathers its weight.
    given = model if part == "the model" else model[1][0] if how == "an inner unit" else model[0]
    f8sub.drop_high_precision(given)
    assert torch.equal(model(x), expected)
    GATHERED[how](model, x)
    with pytest.raises(
        f8sub.Float8ConfigError, match="its weight is sharded; load the adapters into a model"
    ):
        f8sub.restore_high_precision(given)
    model.reshard()
    model[1].reshard()
    kept = [model.get_parameter(name).to_local() for name in names]
    dropped = [isinstance(each, PrimaryWeight) and each.master is None for each in kept]
    assert dropped == [given in (model, module) for module in (model[0], model[1][0], model[2])]
    for name, value, gone in zip(names, values, dropped, strict=True):
        rows = f8sub.quantize(value.flatten(0, -2), "rowwise", "w").dequantize()
        assert torch.equal(model.get_parameter(name).full_tensor(), rows.view_as(value) if gone else value)


@pytest.mark.parametrize("world", [2])
def test_values_that_wait_to_be_dropped_are_not_restored_either(rank, world):
    model = shard(made("rowwise", primary=True).requires_grad_(False))
    f8sub.drop_high_precision(model)
    with pytest.raises(
        f8sub.Float8ConfigError, match="its weight is sharded; load the adapters into a model"
    ):
        f8sub.restore_high_precision(model)


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize("options", [{"float8_all_gather": False}, {}, {"primary_weights": True}], ids=str)
def test_masters_of_weights_that_fsdp2_keeps_gathered_step(rank, world, options):
    """An evaluation between backward and step leaves the root's parameters gathered; they are no other weights."""
    results = []
    for evaluates in (True, False):
        model = seed_weights(Stack(32, 32, 32)).bfloat16()
        fully_shard(f8sub.convert_to_float8(model, "rowwise", **options))
        optimizer = optimizer_of(model, masters=True)
        x = gaussian((8, 32), generator(rank)).bfloat16()
        with silenced():
            model(x).square().mean().backward()
            if evaluates:
                with torch.no_grad():
                    model(x)
            update(model, optimizer)
        model.reshard()
        results.append([p.full_tensor().detach() for p in model.parameters()])
    assert equal(*results)


def test_codes_that_are_held_hold_no_other_weight(rank, world):
    """Model, conversion and another layer's shard are gone while codes of one layer are held."""
    model = f8sub.convert_to_float8(seed_weights(Stack(32, 32, 32)), primary_weights=True)
    fully_shard(model.requires_grad_(False))
    f8sub.drop_high_precision(model)
    model(gaussian((8, 32), generator(1)))
    conversion, other = model.layers[0]._f8sub.conversion, shard_of(model.layers[1])
    references = [weakref.ref(each) for each in (model, conversion, other)]
    weight = model.layers[0].weight
    del model, conversion, other
    gc.collect()
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
    assert weight.numel() > 0
