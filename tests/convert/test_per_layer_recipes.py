"""convert_to_float8 with a recipe for each pattern: who gets which, what is reported, what is refused."""

import copy

import pytest
import torch
from torch import nn

import f8sub
from tests.convert.models import converted, mlp, reasons, x_of
from tests.data_sets import gaussian, generator
from tests.models import transformer

RECIPES = f8sub.recipe_names()


def recipe_names(model: nn.Module) -> dict[str, str]:
    layers = {fqn: m for fqn, m in model.named_modules() if isinstance(m, f8sub.Float8Linear)}
    return {fqn: layer._f8sub.plan.recipe.name for fqn, layer in layers.items()}


def test_the_first_pattern_that_matches_decides():
    recipe = {"blocks.1.down": "rowwise_with_gw_hp", "blocks.*.[ud]*": "rowwise", "*": "tensorwise"}
    names = recipe_names(transformer(recipe))
    assert names.pop("blocks.1.down") == "rowwise_with_gw_hp"
    by_rows = {fqn for fqn, name in names.items() if name == "rowwise"}
    assert by_rows == {"blocks.0.up", "blocks.0.down", "blocks.1.up"}
    assert {names[fqn] for fqn in ("blocks.0.q", "blocks.1.gate", "blocks.1.o")} == {"tensorwise"}
    assert len(names) == 2 * 7 - 1


@pytest.mark.parametrize("recipe", RECIPES, ids=RECIPES)
def test_each_layer_computes_with_its_own(recipe):
    """Bitwise what a model of that recipe alone computes in that layer."""
    mixed = f8sub.convert_to_float8(mlp(), recipe={"up": recipe, "down": "tensorwise"})
    alone = {name: f8sub.convert_to_float8(mlp(), recipe=name) for name in (recipe, "tensorwise")}
    results = []
    for up, down in ((mixed.up, mixed.down), (alone[recipe].up, alone["tensorwise"].down)):
        x = x_of().requires_grad_()
        y = down(torch.relu(up(x)))
        y.backward(gaussian(tuple(y.shape), generator(3)))
        results.append([y, x.grad, up.weight.grad, down.weight.grad, up.bias.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_layer_that_no_pattern_matches_stays_as_it_is():
    model = f8sub.convert_to_float8(mlp(), recipe={"up": "rowwise"})
    assert converted(model) == ["up"]
    assert reasons(model) == {"down": "no pattern of recipe matches it", "lm_head": "output head (default)"}
    assert type(model.down.weight) is nn.Parameter


IDLE = {
    "nothing": ({"mlp": "rowwise", "*": "tensorwise"}, r"'mlp' matches no linear layer"),
    "earlier": (
        {"*": "tensorwise", "up": "rowwise"},
        r"'up' matches only layers that an earlier pattern matches too \('\*' up\)",
    ),
    "skipped": (
        {"lm_head": "rowwise", "*": "tensorwise"},
        r"'lm_head' matches no layer that is converted \(lm_head: output head \(default\)\)",
    ),
}


@pytest.mark.parametrize("case", IDLE, ids=list(IDLE))
def test_a_pattern_that_decides_for_no_layer_is_reported(case):
    recipe, message = IDLE[case]
    model = mlp()
    with pytest.warns(f8sub.Float8Warning, match=message):
        f8sub.convert_to_float8(model, recipe=recipe)
    for again in (model, copy.deepcopy(model)):
        report = f8sub.conversion_report(again)
        (idle,) = report.idle_patterns
        assert f"idle patterns: {idle}" in str(report)
        assert "\n" not in report.summary
    assert converted(model) == ["up", "down"]


def advice(recipe: dict[str, str], **options: object) -> str:
    """What a warning of idle patterns says to do."""
    with pytest.warns(f8sub.Float8Warning) as warned:
        f8sub.convert_to_float8(mlp(), recipe=recipe, **options)
    return str(warned[0].message)


def test_the_advice_is_for_the_reason():
    """Another order helps where an earlier pattern takes the layers, and not where ``skip`` does."""
    assert "put the finer ones first" in advice({"*": "tensorwise", "up": "rowwise"})
    said = advice({"up": "rowwise", "*": "tensorwise"}, skip="down")
    assert "'*' matches no layer that is converted and that 'up' does not take (down: skip='down')" in said
    assert "first" not in said
    assert "first" not in advice({"mlp": "rowwise", "*": "tensorwise"})


@pytest.mark.filterwarnings("ignore::f8sub.Float8Warning")
def test_a_bad_recipe_among_them_changes_nothing():
    blocks = f8sub.Float8Format(torch.float8_e4m3fn, f8sub.Tile(32, 32))
    gemm = f8sub.GemmSpec(a=blocks, b=blocks)
    unsupported = f8sub.Recipe(name="blocks", fprop=gemm, dgrad=gemm, wgrad=gemm)
    for recipe, message in (
        ({"up": "tensorwise", "down": "int8"}, "unknown recipe 'int8'"),
        ({"up": "tensorwise", "down": unsupported}, "not tiles of 32x32"),
        ({"nowhere": "tensorwise"}, "nothing to convert"),
        ({}, "nothing to convert"),
    ):
        model = mlp()
        with pytest.raises(f8sub.Float8ConfigError, match=message):
            f8sub.convert_to_float8(model, recipe=recipe, backend="scaled_mm")
        assert (type(model.up), type(model.down)) == (nn.Linear, nn.Linear)
        assert type(model.up.weight) is nn.Parameter


def test_tied_layers_have_one_recipe():
    def tied() -> nn.ModuleDict:
        model = nn.ModuleDict({name: nn.Linear(32, 32, bias=False) for name in ("encoder", "decoder")})
        model.decoder.weight = model.encoder.weight
        return model

    model = tied()
    with pytest.raises(
        f8sub.Float8ConfigError, match=r"decoder and encoder share one weight.*'tensorwise' and 'rowwise'"
    ):
        f8sub.convert_to_float8(model, recipe={"encoder": "rowwise", "*": "tensorwise"})
    assert type(model.encoder) is nn.Linear
    # x and dy may differ: the weight is read alike.
    also = f8sub.get_recipe("rowwise").with_high_precision(wgrad=True)
    f8sub.convert_to_float8(model, recipe={"encoder": "rowwise", "*": also})
    assert model.decoder.weight is model.encoder.weight


def test_a_weight_read_in_high_precision_is_gathered_so_layer_by_layer():
    """One layer's dgrad in high precision does not take the others' float8 all-gather away."""
    sensitive = f8sub.get_recipe("tensorwise").with_high_precision(dgrad=True)
    model = f8sub.convert_to_float8(mlp(), recipe={"up": sensitive, "*": "tensorwise"})
    assert [layer._f8sub.float8_all_gather for layer in (model.up, model.down)] == [False, True]
    assert [hasattr(layer.weight, "fsdp_pre_all_gather") for layer in (model.up, model.down)] == [False, True]
    assert "gathered in high precision" in str(f8sub.conversion_report(model))
