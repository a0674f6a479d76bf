"""The wire of experts in a conversion report is what FSDP2 gathers."""

import pytest

import f8sub
from tests.experts.ranks.test_experts_sharded import converted, sharded
from tests.wire import Wire


@pytest.mark.parametrize(("experts", "recipe"), [(4, "tensorwise"), (3, "mxfp8")])
def test_wire(rank, world, experts, recipe):
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
    for predicted, gathered in found:
        assert predicted == gathered > 0
