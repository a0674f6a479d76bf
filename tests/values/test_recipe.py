"""GemmSpec, Recipe and get_recipe: what they refuse, and that a recipe is found by its file's name."""

import dataclasses
import importlib
import inspect
import pkgutil

import pytest
import torch

import f8sub
from f8sub import ALL, Float8Format, GemmSpec, Recipe, ScaleRule, Tile, recipes
from f8sub.formats import E2M1
from tests.contract.test_linear_numerics import COMBINATIONS, GEMMS

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TENSOR = Float8Format(E4M3, Tile(ALL, ALL))
ROW_FLOAT = Float8Format(E4M3, Tile(1, ALL))
HIGH_PRECISION = GemmSpec(a=None, b=None)
RECIPES = f8sub.recipe_names()


def recipe_of(w_rowwise: Float8Format, w_columnwise: Float8Format) -> Recipe:
    return Recipe(
        name="mine",
        fprop=GemmSpec(a=TENSOR, b=w_rowwise),
        dgrad=GemmSpec(a=TENSOR, b=w_columnwise),
        wgrad=GemmSpec(a=TENSOR, b=TENSOR),
    )


def test_one_direction_in_high_precision_has_nothing_to_derive():
    fprop, others = GemmSpec(a=ROW_FLOAT, b=ROW_FLOAT), dict.fromkeys(("dgrad", "wgrad"), HIGH_PRECISION)
    recipe = Recipe(name="mine", fprop=fprop, **others)
    assert recipe.formats("w") == (ROW_FLOAT, None)


def test_which_gemm_reads_which_usage():
    formats = [Float8Format(dtype, Tile(size, size)) for size in (8, 16, 32) for dtype in (E4M3, E5M2)]
    x_row, dy_row, dy_col, x_col, *_ = formats
    fprop, dgrad = GemmSpec(a=x_row, b=TENSOR), GemmSpec(a=dy_row, b=TENSOR)
    recipe = Recipe(name="mine", fprop=fprop, dgrad=dgrad, wgrad=GemmSpec(a=dy_col, b=x_col))
    found = [recipe.formats(operand) for operand in ("x", "w", "dy")]
    assert found == [(x_row, x_col), (TENSOR, TENSOR), (dy_row, dy_col)]


@pytest.mark.parametrize("name", RECIPES, ids=RECIPES)
def test_a_recipe_is_the_attribute_of_its_file_and_has_its_name(name):
    assert f8sub.recipe_names() == sorted(m.name for m in pkgutil.iter_modules(recipes.__path__))
    recipe = f8sub.get_recipe(name)
    assert f8sub.get_recipe(recipe) is recipe
    assert recipe.with_high_precision() is recipe.with_high_precision(dgrad=False) is recipe
    assert recipe is importlib.import_module(f"f8sub.recipes.{name}").RECIPE
    assert recipe.name == name


OPTIONS = {
    "blockwise": {"power_of_2_scales": False},
    "delayed": {
        "margin": 1,
        "dy_margin": 3,
        "interval": 2,
        "fp8_format": "E4M3",
        "amax_history_len": 16,
        "amax_compute_algo": "most_recent",
        "scaling_factor_compute_algo": max,
        "reduce_amax": False,
        "override_linear_precision": (False, False, False),
    },
    "gridquant": {"block": 128, "dy": E4M3},
    "nvfp4": {"stochastic_rounding": True, "hadamard": True},
}


@pytest.mark.parametrize("name", RECIPES, ids=RECIPES)
def test_options_make_another_recipe_of_the_same_name_and_defaults_the_same_one(name):
    module = importlib.import_module(f"f8sub.recipes.{name}")
    assert module.recipe() == module.RECIPE
    options = OPTIONS.get(name, {})
    assert list(inspect.signature(module.recipe).parameters) == list(options)
    if options:
        made = f8sub.get_recipe(name, **options)
        assert made.name == name
        assert made != module.RECIPE
        assert made == f8sub.get_recipe(name, **options)


@pytest.mark.parametrize("name", RECIPES, ids=RECIPES)
def test_an_unknown_option_lists_the_valid_ones(name):
    valid = ".*".join(OPTIONS.get(name, {"none": None}))
    with pytest.raises(f8sub.Float8ConfigError, match=rf"{name}.*no options \['granularity'\].*{valid}"):
        f8sub.get_recipe(name, granularity=1)


FOUR_BITS = Float8Format(E2M1, Tile(1, 16), ScaleRule.TWO_LEVEL)
ROTATED = dataclasses.replace(FOUR_BITS, hadamard=16)
ROTATED_GEMM = GemmSpec(a=ROTATED, b=dataclasses.replace(ROTATED, tile=Tile(16, 16)))
BOTH, SAME = "both operands in float8 or neither", "same Hadamard transform and packing"
SWITCH = "of recipe 'nvfp4' is True or False, got"
WRONG = {
    "a alone": (lambda: GemmSpec(a=TENSOR, b=None), BOTH),
    "b alone": (lambda: GemmSpec(a=None, b=TENSOR), BOTH),
    "w by rows with float scales": (
        lambda: recipe_of(ROW_FLOAT, ROW_FLOAT),
        r"'mine'.*columnwise weight.*round twice",
    ),
    "w in two dtypes": (lambda: recipe_of(TENSOR, Float8Format(E5M2, Tile(ALL, ALL))), "dtypes differ"),
    "a is not rotated": (lambda: GemmSpec(a=FOUR_BITS, b=ROTATED), SAME),
    "b is not rotated": (lambda: GemmSpec(a=ROTATED, b=FOUR_BITS), SAME),
    "a is not packed": (lambda: GemmSpec(a=FOUR_BITS, b=TENSOR), SAME),
    "rotated everywhere": (
        lambda: Recipe(name="mine", fprop=ROTATED_GEMM, dgrad=ROTATED_GEMM, wgrad=ROTATED_GEMM),
        "Hadamard transform runs along",
    ),
    "operand y": (lambda: f8sub.get_recipe("rowwise").formats("y"), '"x", "w", "dy"'),
    "no operand": (lambda: f8sub.get_recipe("rowwise").formats(""), '"x", "w", "dy"'),
    **{
        f"block {block}": (
            lambda block=block: f8sub.get_recipe("gridquant", block=block),
            f"block={block} is no positive multiple of 16: .*GPUs multiply blocks of",
        )
        for block in (100, 0, 128.0)
    },
    "dy": (
        lambda: f8sub.get_recipe("gridquant", dy=E2M1),
        "dy=.* is neither torch.float8_e5m2 nor torch.float8_e4m3fn",
    ),
    "fp8_format": (lambda: f8sub.get_recipe("delayed", fp8_format=["HYBRID"]), "fp8_format is one of"),
    "hadamard=32": (lambda: f8sub.get_recipe("nvfp4", hadamard=32), SWITCH),
    "hadamard=None": (lambda: f8sub.get_recipe("nvfp4", hadamard=None), SWITCH),
    "stochastic_rounding": (lambda: f8sub.get_recipe("nvfp4", stochastic_rounding="no"), SWITCH),
    "options of a recipe": (lambda: f8sub.get_recipe(recipe_of(TENSOR, TENSOR), block=128), "'mine' itself"),
    **{
        f"name {name}": (lambda name=name: f8sub.get_recipe(name), "unknown recipe.*rowwise.*tensorwise")
        for name in ("tensor_wise", "", "../errors", "RECIPE")
    },
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_recipe_is_refused(case):
    make, message = WRONG[case]
    with pytest.raises(f8sub.Float8ConfigError, match=message):
        make()


def test_fast_accumulation_in_fprop_only():
    for name in RECIPES:
        recipe = f8sub.get_recipe(name)
        assert not recipe.dgrad.fast_accum, name
        assert not recipe.wgrad.fast_accum, name
        # Scales of parts of K are applied to partial sums, which leave the accumulator anyway.
        assert recipe.fprop.fast_accum == (recipe.fprop.a.tile.cols == ALL), name


@pytest.mark.parametrize("gemms", COMBINATIONS, ids="-".join)
@pytest.mark.parametrize("name", RECIPES, ids=RECIPES)
def test_with_high_precision_changes_those_gemms_and_the_name(name, gemms):
    recipe = f8sub.get_recipe(name)
    changed = recipe.with_high_precision(**dict.fromkeys(gemms, True))
    newly = [gemm for gemm in gemms if getattr(recipe, gemm) != HIGH_PRECISION]
    for gemm in GEMMS:
        assert getattr(changed, gemm) == (HIGH_PRECISION if gemm in gemms else getattr(recipe, gemm))
    if newly:
        assert changed.name == f"{name}, {' and '.join(newly)} in high precision"
    else:
        assert changed is recipe
    assert changed.with_high_precision(**dict.fromkeys(gemms, True)) is changed
    assert f8sub.get_recipe(name).name == name
