"""A recipe for each layer under FSDP2: every gathered weight has its own layer's format."""

import pytest
import torch

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import Transformer, float8_layers, seed_weights, shard
from tests.wires import PER_LAYER


def gathered(rank: int, world: int) -> list[tuple[str, str, bool]]:
    """fqn, the gathered weight's format, and whether it is the cast of the whole weight."""
    model = f8sub.convert_to_float8(seed_weights(Transformer(), 2.0), recipe=PER_LAYER)
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
