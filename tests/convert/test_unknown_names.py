"""Names that there are not: options, filters, attributes of f8sub, and names of other libraries."""

import importlib
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import f8sub
from f8sub.convert.messages import NAMES
from f8sub.errors import nearest, shown
from tests.convert.models import mlp
from tests.docs.pages import ROOT


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("tensor_wise", f8sub.recipe_names(), "tensorwise"),
        ("Tensor-Wise", f8sub.recipe_names(), "tensorwise"),
        ("tensorwsie", f8sub.recipe_names(), "tensorwise"),
        ("row", f8sub.recipe_names(), "rowwise"),
        ("h20", ["H200", "B200"], "H200"),
        ("llama3-8B", ["llama3-70b", "llama3-8b"], "llama3-8b"),
    ],
)
def test_the_nearest_name_comes_first(name, known, expected):
    assert nearest(name, known)[0] == expected


def test_no_name_is_near_to_one_that_is_like_none():
    assert nearest("zebra", f8sub.recipe_names()) == []
    with pytest.raises(
        f8sub.Float8ConfigError, match=r"^unknown recipe 'zebra'; choose one of blockwise, delayed,"
    ):
        f8sub.get_recipe("zebra")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, "3"),
        ("q", "'q'"),
        (torch.optim.SGD([torch.zeros(2)]), "an SGD of torch"),
        (torch.optim.AdamW([torch.zeros(2)]), "an AdamW of torch"),
        (nn.GELU(), "a GELU of torch"),
        (nn.Linear(2, 2).state_dict(), "an OrderedDict of collections"),
        (nn.ReLU(), "a ReLU of torch"),
        (["lm_head", 3], "['lm_head', 3]"),
        (("a",), "('a',)"),
        ({"a": nn.ReLU()}, "{'a': a ReLU of torch}"),
        ([], "[]"),
        (list("abcdef"), "['a', 'b', 'c', 'd', ...]"),
        (range(3), "a range"),
        (nearest, "the function nearest"),
        (torch.float16, "torch.float16"),
    ],
)
def test_what_was_given_is_shown_with_its_article(value, expected):
    assert shown(value) == expected


UNKNOWN = {
    "recipe": (
        lambda: f8sub.get_recipe("tensor_wise"),
        r"unknown recipe 'tensor_wise' \(nearest: tensorwise\)",
    ),
    "option": (lambda: f8sub.get_recipe("gridquant", blok=64), r"no options \['blok'\] \(nearest: block\)"),
    "backend": (
        lambda: f8sub.convert_to_float8(mlp(), backend="tritn"),
        r"unknown backend 'tritn' \(nearest: triton\)",
    ),
    "keep_x": (
        lambda: f8sub.convert_to_float8(mlp(), keep_x={"*": "flaot8"}),
        r"unknown keep_x 'flaot8' \(nearest: float8\)",
    ),
    "layout": (
        lambda: f8sub.float8_state_dict(
            f8sub.convert_to_float8(mlp()), "compresed-tensors", dtype=torch.bfloat16
        ),
        r"unknown layout 'compresed-tensors' \(nearest: compressed-tensors\)",
    ),
    "policy": (lambda: f8sub.checkpoint_policy("gemm"), r"unknown keep 'gemm' \(nearest: gemms\)"),
    "keyword": (lambda: f8sub.convert_to_float8(mlp(), Skip=()), "no option 'Skip', got .*: use skip"),
    "alias": (
        lambda: f8sub.convert_to_float8(mlp(), filter_fqn=[]),
        "no option 'filter_fqn', .*: use filter_fqns",
    ),
}


FOREIGN = {
    **dict.fromkeys(("exclude", "ignore", "skip_modules", "modules_to_not_convert"), "use skip;"),
    "round_scales_to_power_of_2": 'use recipe="rowwise" or "blockwise", or a recipe with f8sub.ScaleRule.POWER_OF_2;',
    "pad_inner_dim": "leave it out: f8sub fills up rows of x",
    "force_recompute_fp8_weight_in_bwd": "leave it out: f8sub never saves",
    "emulate": 'use backend="reference";',
    "use_fast_accum": "f8sub.GemmSpec(fast_accum=...)",
    "margin": 'f8sub.get_recipe("delayed", ...)',
}


@pytest.mark.parametrize("name", FOREIGN)
def test_an_option_of_another_library_leads_to_f8subs(name):
    with pytest.raises(f8sub.Float8ConfigError) as raised:
        f8sub.convert_to_float8(mlp(), **{name: ["lm_head"]})
    assert f"no option {name!r}, got {name}=['lm_head']: " in str(raised.value)
    assert FOREIGN[name] in str(raised.value)


NAMES_OF_MODULES = {
    "f8sub": ("convert_to_float8_training", "; there is f8sub.convert_to_float8(model)"),
    "f8sub.tensor_parallel": ("Float8ColwiseParalel", " (nearest: Float8ColwiseParallel"),
    "f8sub.integrations": ("acelerate", " (nearest: accelerate"),
}


@pytest.mark.parametrize("module", NAMES_OF_MODULES)
def test_an_import_says_what_an_attribute_does(module):
    name, told = NAMES_OF_MODULES[module]
    with pytest.raises(ImportError, match=f"^cannot import name '{name}' from '{module}'{re.escape(told)}"):
        exec(f"from {module} import {name}", {})
    there = importlib.import_module(module)
    assert not hasattr(there, name)
    with pytest.raises(
        AttributeError, match=f"^module '{module}' has no attribute '{name}'{re.escape(told)}"
    ):
        getattr(there, name)


@pytest.mark.parametrize("name", UNKNOWN)
def test_the_nearest_name_is_told(name):
    call, told = UNKNOWN[name]
    with pytest.raises(f8sub.Float8ConfigError, match=told):
        call()


CALLS = {
    "convert_from_float8": f8sub.convert_from_float8,
    "an export": lambda model: f8sub.float8_state_dict(model, dtype=torch.bfloat16),
    "load_float8": lambda model: f8sub.load_float8(model, "folder"),
    "Monitor": f8sub.Monitor,
    "conversion_report": f8sub.conversion_report,
    "sensitivity": lambda model: f8sub.sensitivity(model, torch.sum),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_model_is_told(call):
    with pytest.raises(
        f8sub.Float8ConfigError, match=f"^{call} takes a model, a torch.nn.Module; got an OrderedDict of"
    ):
        CALLS[call](mlp().state_dict())


def test_an_option_under_two_names_has_one_value():
    for given in ("tensorwise", "blockwise"):  # the default's name, too
        with pytest.raises(
            f8sub.Float8ConfigError, match=f"recipe='{given}' and recipe_name='rowwise' are the same"
        ):
            f8sub.convert_to_float8(mlp(), recipe=given, recipe_name="rowwise")
    with pytest.raises(
        f8sub.Float8ConfigError, match="float8_all_gather=False and enable_fsdp_float8_all_gather=True"
    ):
        f8sub.convert_to_float8(mlp(), float8_all_gather=False, enable_fsdp_float8_all_gather=True)
    model = f8sub.convert_to_float8(mlp(), recipe="rowwise", recipe_name="rowwise")
    assert model.up._f8sub.plan.recipe.name == "rowwise"


def test_aliases_are_no_parameters_of_their_own():
    model = f8sub.convert_to_float8(mlp(), module_filter_fn=lambda module, fqn: fqn != "up", filter_fqns="lm")
    assert not isinstance(model.up, f8sub.Float8Linear)
    both = {
        "filter_fn": lambda module, fqn: fqn != "up",
        "module_filter_fn": lambda module, fqn: fqn != "down",
    }
    with pytest.raises(f8sub.Float8ConfigError, match="found nothing to convert"):
        f8sub.convert_to_float8(mlp(), **both)


FILTERS = {
    "of a module alone": lambda module: True,
    "of three": lambda module, fqn, more: True,
    "no function": "up",
}


@pytest.mark.parametrize("option", ["filter_fn", "module_filter_fn"])
@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_that_cannot_be_called_is_refused_before_a_layer_is_converted(name, option):
    model = mlp()
    with pytest.raises(
        f8sub.Float8ConfigError, match=r"filter_fn is called with a layer and its name, \(module, fqn\)"
    ):
        f8sub.convert_to_float8(model, **{option: FILTERS[name]})
    assert type(model.up) is nn.Linear


class _Filter:
    def keeps(self, module: nn.Module, fqn: str, *, deep: bool = False) -> bool:
        return fqn == "up"


@pytest.mark.parametrize("function", [_Filter().keeps, lambda *args: args[1] == "up"])
def test_a_filter_may_be_anything_that_takes_both(function):
    assert isinstance(f8sub.convert_to_float8(mlp(), filter_fn=function).up, f8sub.Float8Linear)


def test_a_layer_is_not_made_by_its_class():
    told = r"Float8Linear is created by f8sub\.convert_to_float8, .* nn\.Linear and convert it"
    with pytest.raises(f8sub.Float8ConfigError, match=told):
        f8sub.Float8Linear(64, 64)
    own = type("Projection", (nn.Linear,), {})
    made = type(f8sub.convert_to_float8(nn.Sequential(own(32, 32)))[0])
    with pytest.raises(f8sub.Float8ConfigError, match="Float8Projection is created by"):
        made(32, 32)


def test_what_to_do_where_nothing_was_converted():
    with pytest.raises(
        f8sub.Float8ConfigError, match=r"\. Fill the dimensions up to multiples of 16, or pass strict"
    ):
        f8sub.convert_to_float8(nn.Sequential(nn.Linear(50, 50)))


def test_a_model_that_torchao_converted():
    float8 = pytest.importorskip("torchao.float8")
    model = float8.convert_to_float8_training(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    told = r"it is torchao's Float8Linear; convert a model by one library\)\. Leave out the other library's conversion"
    with pytest.raises(f8sub.Float8ConfigError, match=told):
        f8sub.convert_to_float8(model)


def test_attributes_that_there_are_not():
    with pytest.raises(AttributeError, match=r"no attribute 'convert_to_fp8' \(nearest: convert_to_float8"):
        _ = f8sub.convert_to_fp8
    with pytest.raises(AttributeError, match=r"no attribute 'zebra'$"):
        _ = f8sub.zebra
    assert not hasattr(f8sub, "__wrapped__")
    assert f8sub.errors.nearest is nearest


@pytest.mark.parametrize("name", NAMES)
def test_names_of_other_libraries_are_those_of_the_page(name):
    if name == "titan":  # of f8sub, and imported by itself
        code = "import f8sub\ntry: f8sub.titan\nexcept AttributeError as error: print(error)"
        told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        assert told.strip().endswith("there is a module that is imported by itself: import f8sub.titan")
        return
    assert re.search(rf"\b{name}\b", (ROOT / "docs" / "migration.md").read_text())
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; there is "):
        getattr(f8sub, name)


def test_dir_has_what_is_public():
    names = dir(f8sub)
    assert names == sorted(names)
    assert {*f8sub.__all__, "optim", "tensor_parallel", "__version__", "__doc__"} <= {*names}
    assert not {"host_copy", "torch_compat", "errors", "formats", "features"} & {*names}


@pytest.mark.parametrize(
    ("module", "name", "near"),
    [
        (f8sub, "converttofloat8", "convert_to_float8"),
        (f8sub.tensor_parallel, "Float8ColwiseParalel", "Float8ColwiseParallel"),
        (f8sub.integrations, "transfomers", "transformers"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_misspelt_attribute_is_told_with_the_nearest(module, name, near):
    told = rf"module '{module.__name__}' has no attribute '{name}' \(nearest: {near}"
    with pytest.raises(AttributeError, match=told):
        getattr(module, name)


def test_integrations_are_imported_when_they_are_named():
    code = """
import sys, f8sub
print("f8sub.integrations" in sys.modules, "accelerate" in sys.modules)
print(f8sub.integrations.accelerate.prepare.__name__, "accelerate" in sys.modules, "lightning" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False", "prepare", "True", "False"]
