"""The account of bytes under FSDP2 is what crosses the wire, what shards take, and what is gathered."""

import gc
import time

import pytest
import torch
from torch import nn

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import BF16, Stack, float8_layers, seed_weights, shard
from tests.wire import ONE_RECIPE_A_WIRE, Wire, on_each

WIDTHS = {2: (64, 96, 48), 3: (64, 80, 16)}
TOKENS = 16
on_each_wire = on_each(ONE_RECIPE_A_WIRE)


def stack(world: int, recipe: str | None, **options) -> nn.Module:
    model = seed_weights(Stack(*WIDTHS[world]))
    return model if recipe is None else f8sub.convert_to_float8(model, recipe=recipe, **options)


def run(model: nn.Module) -> int:
    """Bytes that the all-gathers of a forward fill."""
    x = gaussian((TOKENS, model.layers[0].in_features), generator(1))
    with torch.no_grad(), Wire() as wire:
        model(x)
    return wire.gathered


def kept_since(before: dict[int, int], expected: int) -> int:
    """Bytes of codes that are there and were not before, once gloo's threads let go of what they received."""
    for _ in range(500):
        kept = sum(size for address, size in code_storages().items() if address not in before)
        if kept == expected:
            break
        time.sleep(0.01)
    return kept


def code_storages() -> dict[int, int]:
    """What ranks send lies in bytes; scale tables have other dtypes."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.dtype is torch.uint8]
    return {storage._cdata: storage.nbytes() for storage in storages}


@pytest.mark.parametrize(
    ("world", "policy", "all_gather"),
    [(2, BF16, True), (3, None, True), (2, BF16, False)],
    ids=["2-bf16", "3-fp32", "gathered-in-high-precision"],
)
@on_each_wire
def test_sharded_weights(rank, world, recipe, policy, all_gather):
    before, dtype = code_storages(), torch.float32 if policy is None else torch.bfloat16
    model = shard(stack(world, recipe, float8_all_gather=all_gather), policy)
    f8sub.precompute_scales(model)
    run(model)
    unsharded = []

    def look(layer: nn.Module, args: object) -> None:
        weight = layer.weight
        held = weight.rowwise_data if isinstance(weight, f8sub.Float8Tensor) else weight
        unsharded.append(held.untyped_storage().nbytes())

    hooks = [layer.register_forward_pre_hook(look) for layer in float8_layers(model)]
    wire = run(model)
    for hook in hooks:
        hook.remove()
    for module in (*model.layers, model):
        module.reshard()
    account = f8sub.conversion_report(model, TOKENS, dtype=dtype).bytes
    kept = kept_since(before, account.here.codes)
    masters = [layer.weight._local_tensor.untyped_storage().nbytes() for layer in float8_layers(model)]
    plain = run(shard(stack(world, None), policy))
    assert account.here.wire == wire == sum(unsharded)
    assert account.here.master == sum(masters)
    assert account.here.codes == kept
    assert account.high_precision.wire == plain


@on_each_wire
def test_the_wire_is_told_before_the_model_is_sharded(rank, world, recipe):
    model = stack(world, recipe)
    before = f8sub.conversion_report(model, TOKENS).bytes.here
    after = f8sub.conversion_report(shard(model), TOKENS).bytes.here
    assert (before.wire, before.saved) == (after.wire, after.saved)
