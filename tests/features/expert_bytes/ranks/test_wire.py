"""The wire of experts in a conversion report is what FSDP2 gathers."""

import pytest

import f8sub
from tests.features.experts.ranks.test_sharded import converted, sharded
from tests.wire import Wire


def wires(rank: int, world: int, experts: int, recipe: str) -> list[tuple[int, int]]:
    """What is predicted and what is gathered, of experts in float8 and in high precision."""
    found = []
    for gathered in (True, False):
        model = sharded(converted(experts, recipe, float8_all_gather=gathered))
        f8sub.precompute_scales(model)
        layers = f8sub.conversion_report(model, 8, dtype=model.experts.up.dtype).bytes.layers
        with Wire() as wire:
            model.experts.unshard()
        found.append(
            (sum(layer.here.wire for layer in layers if layer.fqn.startswith("experts")), wire.gathered)
        )
    return found


@pytest.mark.parametrize(("experts", "recipe"), [(4, "tensorwise"), (3, "mxfp8")])
def test_wire(ranks, experts, recipe):
    for found in ranks(2, wires, experts, recipe):
        for predicted, gathered in found:
            assert predicted == gathered > 0
