"""A recipe for each layer under FSDP2: one all-reduce for all of them, on as off, every gathered weight its own."""

import pytest
import torch

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import BF16, Transformer, float8_layers, loss_of, seed_weights, shard, take_step
from tests.wire import Wire

RECIPE = {
    "blocks.1.[gu]*": "rowwise_with_gw_hp",
    "blocks.1.o": "mxfp8",
    "blocks.1.v": "nvfp4",
    "blocks.1.down": "blockwise",
    "blocks.0": "rowwise",
    "*": "tensorwise",
}
STEPS = 3


def train(rank: int, world: int) -> list[tuple[list[float], list[int]]]:
    """Losses and the all-reduces of amaxes of each step, with and without the float8 all-gather."""
    results = []
    for all_gather in (True, False):
        model = f8sub.convert_to_float8(
            seed_weights(Transformer(), 2.0), recipe=RECIPE, float8_all_gather=all_gather
        )
        model = shard(model, BF16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses, reductions = [], []
        for step in range(STEPS):
            with Wire() as wire:
                f8sub.precompute_scales(model)
            reductions.append(wire.all_reduces)
            losses.append(take_step(optimizer, loss_of(model, step, rank)))
        results.append((losses, reductions))
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_on_is_off_and_one_all_reduce_serves_all(ranks, world):
    for (on, reductions), (off, none) in ranks(world, train):
        assert on == off
        assert len(set(on)) == len(on)
        assert (reductions, none) == ([1] * STEPS, [0] * STEPS)


def gathered(rank: int, world: int) -> list[tuple[str, str, bool]]:
    """fqn, the gathered weight's format, and whether it is the cast of the whole weight."""
    model = f8sub.convert_to_float8(seed_weights(Transformer(), 2.0), recipe=RECIPE)
    whole = {
        layer.fqn: torch.zeros_like(layer.weight) + layer.weight.detach() for layer in float8_layers(model)
    }
    model = shard(model)
    f8sub.precompute_scales(model)
    found = []

    def look(layer: f8sub.Float8Linear, args: tuple) -> None:
        expected = f8sub.quantize(whole[layer.fqn], layer.plan.recipe, operand="w").rowwise
        usage = layer.weight.rowwise
        equal = torch.equal(usage.data.view(torch.uint8), expected.data.view(torch.uint8))
        found.append(
            (layer.fqn, usage.format.name, equal and torch.equal(usage.scale_inv, expected.scale_inv))
        )

    for layer in float8_layers(model):
        layer.register_forward_pre_hook(look)
    model(gaussian((4, 4, 32), generator(1)))
    return found


@pytest.mark.parametrize("world", [1, 2, 5])
def test_each_weight_is_gathered_in_its_own_format(ranks, world):
    for found in ranks(world, gathered):
        assert len(found) == 14
        assert all(equal for _, _, equal in found)
        formats = {fqn: format for fqn, format, _ in found}
        assert formats["blocks.1.q"] == "e4m3[allxall]"
        assert formats["blocks.0.q"] == formats["blocks.1.gate"] == "e4m3[1xall,power_of_2]"
