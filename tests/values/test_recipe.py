"""GemmSpec, Recipe and get_recipe: what they refuse, and that a recipe is found by its file's name."""

import dataclasses
import importlib
import inspect
import itertools
import pkgutil

import pytest
import torch

import f8sub
from f8sub import ALL, Float8Format, GemmSpec, Recipe, ScaleRule, Tile, recipes
from f8sub.formats import E2M1

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TENSOR = Float8Format(E4M3, Tile(ALL, ALL))
ROW_FLOAT = Float8Format(E4M3, Tile(1, ALL))
ROW_POW2 = Float8Format(E4M3, Tile(1, ALL), ScaleRule.POWER_OF_2)
HIGH_PRECISION = GemmSpec(a=None, b=None)
RECIPES = f8sub.recipe_names()


def recipe_of(w_rowwise: Float8Format, w_columnwise: Float8Format) -> Recipe:
    return Recipe(
        name="mine",
        fprop=GemmSpec(a=TENSOR, b=w_rowwise),
        dgrad=GemmSpec(a=TENSOR, b=w_columnwise),
        wgrad=GemmSpec(a=TENSOR, b=TENSOR),
    )


@pytest.mark.parametrize("one_sided", [(TENSOR, None), (None, TENSOR)], ids=["a", "b"])
def test_a_gemm_takes_both_operands_in_float8_or_neither(one_sided):
    a, b = one_sided
    with pytest.raises(f8sub.Float8ConfigError, match="both operands in float8 or neither"):
        GemmSpec(a=a, b=b)


def test_a_rowwise_weight_with_float_scales_is_refused():
    with pytest.raises(f8sub.Float8ConfigError, match=r"'mine'.*columnwise weight.*round twice"):
        recipe_of(ROW_FLOAT, ROW_FLOAT)


def test_a_weight_in_two_element_dtypes_is_refused():
    with pytest.raises(f8sub.Float8ConfigError, match="dtypes differ"):
        recipe_of(TENSOR, Float8Format(E5M2, Tile(ALL, ALL)))


def test_what_can_be_derived_is_accepted():
    assert recipe_of(ROW_POW2, ROW_POW2).formats("w") == (ROW_POW2, ROW_POW2)
    assert recipe_of(TENSOR, TENSOR).formats("w") == (TENSOR, TENSOR)


def test_float_scales_by_row_are_fine_for_x_and_dy():
    """They are cast from high precision for each usage; only a weight is derived."""
    spec = GemmSpec(a=ROW_FLOAT, b=TENSOR)
    recipe = Recipe(name="mine", fprop=spec, dgrad=spec, wgrad=GemmSpec(a=ROW_FLOAT, b=ROW_FLOAT))
    assert recipe.formats("x") == (ROW_FLOAT, ROW_FLOAT)
    assert recipe.formats("dy") == (ROW_FLOAT, ROW_FLOAT)


def test_one_direction_in_high_precision_has_nothing_to_derive():
    recipe = Recipe(
        name="mine", fprop=GemmSpec(a=ROW_FLOAT, b=ROW_FLOAT), dgrad=HIGH_PRECISION, wgrad=HIGH_PRECISION
    )
    assert recipe.formats("w") == (ROW_FLOAT, None)


def test_which_gemm_reads_which_usage():
    formats = [Float8Format(dtype, Tile(size, size)) for size in (8, 16, 32) for dtype in (E4M3, E5M2)]
    x_row, dy_row, dy_col, x_col, *_ = formats
    w = TENSOR
    recipe = Recipe(
        name="mine",
        fprop=GemmSpec(a=x_row, b=w),
        dgrad=GemmSpec(a=dy_row, b=w),
        wgrad=GemmSpec(a=dy_col, b=x_col),
    )
    assert recipe.formats("x") == (x_row, x_col)
    assert recipe.formats("w") == (w, w)
    assert recipe.formats("dy") == (dy_row, dy_col)


@pytest.mark.parametrize("operand", ["y", "dx", ""], ids=["y", "dx", "empty"])
def test_no_other_operand_has_formats(operand):
    recipe = f8sub.get_recipe(RECIPES[0])
    with pytest.raises(f8sub.Float8ConfigError, match='"x", "w", "dy"'):
        recipe.formats(operand)


def test_recipe_names_are_the_files():
    assert f8sub.recipe_names() == sorted(m.name for m in pkgutil.iter_modules(recipes.__path__))
    assert {"tensorwise", "rowwise"} <= set(f8sub.recipe_names())


@pytest.mark.parametrize("name", RECIPES, ids=RECIPES)
def test_a_recipe_is_the_attribute_of_its_file_and_has_its_name(name):
    recipe = f8sub.get_recipe(name)
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


WRONG = {
    "block-100": (
        "gridquant",
        {"block": 100},
        "block=100 is no positive multiple of 16: .*GPUs multiply blocks of",
    ),
    "block-0": ("gridquant", {"block": 0}, "block=0 is no positive multiple of 16"),
    "block-float": ("gridquant", {"block": 128.0}, "block=128.0 is no positive multiple of 16"),
    "dy": ("gridquant", {"dy": E2M1}, "dy=.* is neither torch.float8_e5m2 nor torch.float8_e4m3fn"),
    "fp8_format": ("delayed", {"fp8_format": ["HYBRID"]}, "fp8_format is one of"),
}


@pytest.mark.parametrize("case", WRONG, ids=list(WRONG))
def test_a_wrong_value_of_an_option_is_refused(case):
    name, wrong, message = WRONG[case]
    with pytest.raises(f8sub.Float8ConfigError, match=message):
        f8sub.get_recipe(name, **wrong)


def test_a_block_that_a_gpu_cannot_multiply_is_one_of_the_references():
    assert f8sub.get_recipe("gridquant", block=48).fprop.a.tile == Tile(48, 48)


@pytest.mark.parametrize(
    "wrong", [{"hadamard": 32}, {"stochastic_rounding": "no"}, {"hadamard": None}], ids=str
)
def test_a_switch_is_true_or_false(wrong):
    with pytest.raises(f8sub.Float8ConfigError, match=r"of recipe 'nvfp4' is True or False, got"):
        f8sub.get_recipe("nvfp4", **wrong)


def test_options_go_with_a_name():
    with pytest.raises(f8sub.Float8ConfigError, match="'mine' itself"):
        f8sub.get_recipe(recipe_of(TENSOR, TENSOR), block=128)


def test_both_operands_of_a_gemm_have_the_same_transform():
    four_bits = Float8Format(E2M1, Tile(1, 16), ScaleRule.TWO_LEVEL)
    rotated = dataclasses.replace(four_bits, hadamard=16)
    for pair in ((four_bits, rotated), (rotated, four_bits), (four_bits, TENSOR)):
        with pytest.raises(f8sub.Float8ConfigError, match="same Hadamard transform and packing"):
            GemmSpec(a=pair[0], b=pair[1])
    gemm = GemmSpec(a=rotated, b=dataclasses.replace(rotated, tile=Tile(16, 16)))
    with pytest.raises(f8sub.Float8ConfigError, match="Hadamard transform runs along"):
        Recipe(name="mine", fprop=gemm, dgrad=gemm, wgrad=gemm)


def test_a_recipe_of_ones_own_needs_no_registration():
    mine = recipe_of(TENSOR, TENSOR)
    assert f8sub.get_recipe(mine) is mine


@pytest.mark.parametrize("name", ["tensor_wise", "", "../errors", "RECIPE"], ids=str)
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(f8sub.Float8ConfigError, match=r"unknown recipe.*rowwise.*tensorwise"):
        f8sub.get_recipe(name)


def test_fast_accumulation_in_fprop_only():
    for name in RECIPES:
        recipe = f8sub.get_recipe(name)
        assert not recipe.dgrad.fast_accum, name
        assert not recipe.wgrad.fast_accum, name
        # Scales of parts of K are applied to partial sums, which leave the accumulator anyway.
        assert recipe.fprop.fast_accum == (recipe.fprop.a.tile.cols == ALL), name


COMBINATIONS = [
    names for count in (1, 2, 3) for names in itertools.combinations(("fprop", "dgrad", "wgrad"), count)
]


@pytest.mark.parametrize("gemms", COMBINATIONS, ids="-".join)
@pytest.mark.parametrize("name", RECIPES, ids=RECIPES)
def test_with_high_precision_changes_those_gemms_and_the_name(name, gemms):
    recipe = f8sub.get_recipe(name)
    changed = recipe.with_high_precision(**dict.fromkeys(gemms, True))
    newly = [gemm for gemm in gemms if getattr(recipe, gemm) != HIGH_PRECISION]
    for gemm in ("fprop", "dgrad", "wgrad"):
        assert getattr(changed, gemm) == (HIGH_PRECISION if gemm in gemms else getattr(recipe, gemm))
    if newly:
        assert changed.name == f"{name}, {' and '.join(newly)} in high precision"
    else:
        assert changed is recipe
    assert changed.with_high_precision(**dict.fromkeys(gemms, True)) is changed
    assert f8sub.get_recipe(name).name == name


def test_with_high_precision_of_nothing_is_the_recipe_itself():
    recipe = f8sub.get_recipe("tensorwise")
    assert recipe.with_high_precision() is recipe
    assert recipe.with_high_precision(dgrad=False) is recipe
    with pytest.raises(TypeError):
        recipe.with_high_precision(lm_head=True)
