"""Recipes with GEMMs in high precision under FSDP2."""

import pytest

import f8sub
from tests import oracle
from tests.contract.test_linear_numerics import COMBINATIONS, recipe_with
from tests.models import BF16, Transformer, float8_layers, seed_weights, shard, train
from tests.selection import long_but

HIGH = [("tensorwise", ("fprop",)), ("mxfp8", ("dgrad",)), ("rowwise", ("wgrad",))]
OTHERS = [
    *(("tensorwise", gemms) for gemms in COMBINATIONS),
    *((recipe, gemms) for recipe in oracle.RECIPES for gemms in COMBINATIONS[:3]),
]


@pytest.mark.parametrize(("recipe", "gemms"), long_but(HIGH, dict.fromkeys([*HIGH, *OTHERS])))
def test_under_fsdp_a_weight_read_in_high_precision_is_gathered_so(rank, world, recipe, gemms):
    """wgrad does not read the weight: with it alone in high precision the all-gather stays float8.

    Three steps with and without the float8 all-gather; whether any weight was gathered in float8.
    """
    results = []
    for all_gather in (True, False):
        model = f8sub.convert_to_float8(
            seed_weights(Transformer(blocks=1), 2.0),
            recipe=recipe_with(recipe, gemms),
            float8_all_gather=all_gather,
        )
        gathers = any(layer.float8_all_gather for layer in float8_layers(model))
        results.append((train(shard(model, BF16), rank), gathers))
    (on, gathers), (off, never) = results
    assert on == off
    assert len(set(on)) == len(on)
    assert (gathers, never) == (None not in recipe_with(recipe, gemms).formats("w"), False)
