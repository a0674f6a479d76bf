"""The bytes of sharded experts in a conversion report are those that FSDP2 gathers, and that stay."""

import pytest

import f8sub
from tests.diagnostics.ranks.test_byte_account import code_storages, kept_since
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


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_no_codes_stay_beside_a_master(rank, world, recipe):
    whole = f8sub.conversion_report(converted(4, recipe), 8).bytes.layers
    made = []
    for all_gather in (True, False):
        before = code_storages()
        model = sharded(converted(4, recipe, float8_all_gather=all_gather))
        f8sub.precompute_scales(model)
        model.experts.unshard()
        model.experts.reshard()
        account = f8sub.conversion_report(model, 8).bytes
        assert account.here.codes == kept_since(before, account.here.codes)
        made.append([layer.here.transient - layer.here.wire for layer in account.layers])
    # What was gathered in high precision is cast beside it.
    for with_codes, without, layer in zip(*made, whole, strict=True):
        assert without - with_codes == layer.here.codes > 0
