"""Any of a recipe's GEMMs in high precision: the products are the oracle's, FSDP2 gathers what they read."""

import itertools

import pytest
import torch
from torch import nn

import f8sub
from tests import oracle
from tests.budgets import excess
from tests.data_sets import make
from tests.models import BF16, Transformer, float8_layers, loss_of, seed_weights, shard, take_step

RECIPES = list(oracle.RECIPES)
COMBINATIONS = [
    names for count in (1, 2, 3) for names in itertools.combinations(("fprop", "dgrad", "wgrad"), count)
]
on_each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=RECIPES)
on_each_combination = pytest.mark.parametrize("gemms", COMBINATIONS, ids="-".join)


def recipe_with(name: str, gemms: tuple[str, ...]) -> f8sub.Recipe:
    return f8sub.get_recipe(name).with_high_precision(**dict.fromkeys(gemms, True))


@on_each_combination
@on_each_recipe
def test_products_are_the_oracles(recipe, gemms):
    for seed, data in enumerate(("gaussian", "row_outliers", "lognormal")):
        x, w, dy = (
            make(data, shape, 10 * seed + i) for i, shape in enumerate(((24, 64), (32, 64), (24, 32)))
        )
        layer = nn.Linear(64, 32, bias=False)
        with torch.no_grad():
            layer.weight.copy_(w)
        model = f8sub.convert_to_float8(nn.Sequential(layer), recipe=recipe_with(recipe, gemms))
        x = x.requires_grad_()
        y = model(x)
        y.backward(dy)
        found = {"y": y, "dx": x.grad, "dw": layer.weight.grad}
        products = oracle.linear(recipe, x, w, dy, high_precision=gemms)
        worst = {name: excess(result, products[name]) for name, result in found.items()}
        assert all(ratio <= 1 for ratio in worst.values()), worst


def losses(rank: int, world: int, recipe: str, gemms: tuple[str, ...]) -> list[tuple[list[float], bool]]:
    """Three steps with and without the float8 all-gather; whether any weight was gathered in float8."""
    results = []
    for all_gather in (True, False):
        model = f8sub.convert_to_float8(
            seed_weights(Transformer(blocks=1), 2.0),
            recipe=recipe_with(recipe, gemms),
            float8_all_gather=all_gather,
        )
        gathers = any(layer.float8_all_gather for layer in float8_layers(model))
        model = shard(model, BF16)
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=3e-3), []
        for step in range(3):
            f8sub.precompute_scales(model)
            found.append(take_step(optimizer, loss_of(model, step, rank)))
        results.append((found, gathers))
    return results


QUICK = [("tensorwise", ("fprop",)), ("mxfp8", ("dgrad",)), ("rowwise", ("wgrad",))]
OTHERS = [("tensorwise", gemms) for gemms in COMBINATIONS] + [
    (r, c) for r in RECIPES for c in COMBINATIONS[:3]
]


@pytest.mark.parametrize(
    ("recipe", "gemms"),
    [*QUICK, *(pytest.param(*o, marks=pytest.mark.long) for o in dict.fromkeys(OTHERS) if o not in QUICK)],
)
def test_under_fsdp_a_weight_read_in_high_precision_is_gathered_so(ranks, recipe, gemms):
    """wgrad does not read the weight: with it alone in high precision the all-gather stays float8."""
    for (on, gathers), (off, never) in ranks(2, losses, recipe, gemms):
        assert on == off
        assert len(set(on)) == len(on)
        assert (gathers, never) == (None not in recipe_with(recipe, gemms).formats("w"), False)
