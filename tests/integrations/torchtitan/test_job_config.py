"""f8sub's section in a job of torchtitan 0.2: its converter by name, a TOML file, options of the command line."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import f8sub
from tests.integrations.torchtitan import runs

pytestmark = pytest.mark.usefixtures("titan_0_2")
alone = functools.partial(runs.alone, titan="titan_0_2")


BY_NAME = 'custom_config_module = "f8sub.titan"'


def parsed(folder: Path, section: str, *options: str, job: str = BY_NAME) -> Any:
    """A job's config, of a TOML file and options of the command line."""
    from torchtitan.config import ConfigManager

    file = folder / "job.toml"
    file.write_text(f'[job]\n{job}\n[model]\nconverters = ["f8sub"]\n{section}\n')
    return ConfigManager().parse_args([f"--job.config_file={file}", *options])


def converted_by(config: Any) -> torch.nn.Module:
    """The debug model, converted as the trainer does."""
    from torchtitan.protocols.model_converter import build_model_converters
    from torchtitan.protocols.train_spec import get_train_spec

    spec = get_train_spec("llama3")
    with torch.device("meta"):
        model = spec.model_cls(spec.model_args["debugmodel"])
    build_model_converters(config, None).convert(model)
    return model


def layers(model: torch.nn.Module) -> dict[str, Any]:
    return {fqn: layer for fqn, layer in model.named_modules() if isinstance(layer, f8sub.Float8Linear)}


@alone
def test_the_converter_is_found_by_its_name_and_on_by_default(tmp_path):
    found = layers(converted_by(parsed(tmp_path, "")))
    dense = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
    dense += ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
    assert set(found) == {f"layers.{i}.{name}" for i in range(2) for name in dense}
    assert {layer._f8sub.plan.recipe.name for layer in found.values()} == {"tensorwise"}
    assert all(layer._f8sub.float8_all_gather for layer in found.values())


@alone
def test_the_section_is_parsed_and_the_command_line_wins(tmp_path):
    section = '[f8sub]\nrecipe_name = "blockwise"\nfilter_fqns = ["attention"]\nemulate = true'
    found = layers(converted_by(parsed(tmp_path, section)))
    assert {fqn.split(".")[-1] for fqn in found} == {"w1", "w2", "w3"}
    assert {layer._f8sub.plan.recipe.name for layer in found.values()} == {"blockwise"}
    assert {layer._f8sub.plan.backend for layer in found.values()} == {"reference"}
    options = "--f8sub.recipe_name=rowwise", "--f8sub.filter_fqns=layers.0.,w2", "--f8sub.no-emulate"
    found = layers(converted_by(parsed(tmp_path, section, *options)))
    assert {layer._f8sub.plan.recipe.name for layer in found.values()} == {"rowwise"}
    assert set(found) == {f"layers.1.{name}" for name in ("feed_forward.w1", "feed_forward.w3")} | {
        f"layers.1.attention.{name}" for name in ("wq", "wk", "wv", "wo")
    }


@alone
def test_options_of_recipes_on_the_command_line(tmp_path):
    options = "margin 3 reduce_amax False amax_compute_algo most_recent"
    others = ["--f8sub.recipe_name=delayed", "--f8sub.keep_x=recompute"]
    model = converted_by(parsed(tmp_path, "", *others, "--f8sub.recipe_options", *options.split()))
    said = {"margin": 3, "reduce_amax": False, "amax_compute_algo": "most_recent"}
    found = layers(model).values()
    assert {layer._f8sub.plan.recipe for layer in found} == {f8sub.get_recipe("delayed", **said)}
    assert {layer._f8sub.keep_x for layer in found} == {"recompute"}


@alone
def test_options_of_the_recipes_of_layers_and_what_is_kept_of_x(tmp_path):
    section = """
[f8sub.recipe_name]
feed_forward = "gridquant"
"*" = "nvfp4"
[f8sub.recipe_options]
gridquant = { block = 64, dy = "float8_e4m3fn" }
nvfp4 = { hadamard = true }
[f8sub.keep_x]
wo = "high_precision"
"""
    found = layers(converted_by(parsed(tmp_path, section)))
    grid = f8sub.get_recipe("gridquant", block=64, dy=torch.float8_e4m3fn)
    assert found["layers.1.feed_forward.w2"]._f8sub.plan.recipe == grid
    assert found["layers.1.attention.wo"]._f8sub.plan.recipe == f8sub.get_recipe("nvfp4", hadamard=True)
    assert {
        fqn.split(".")[-1] for fqn, layer in found.items() if layer._f8sub.keep_x == "high_precision"
    } == {"wo"}


@alone
@pytest.mark.parametrize(
    ("section", "error", "says"),
    [
        ('recipe_nam = "rowwise"', ValueError, "recipe_nam"),
        ('recipe_name = "gridquant"\nrecipe_options = {block = 0}', f8sub.Float8ConfigError, "'block': 0"),
        ('filter_fqns = ["outptu"]', f8sub.Float8ConfigError, "outptu.*output"),
        ('filter_fqns = ["layers"]', f8sub.Float8ConfigError, "nothing to convert"),
    ],
)
def test_a_mistake_is_an_error_before_the_model_is_sharded(tmp_path, section, error, says):
    with pytest.raises(error, match=says):
        converted_by(parsed(tmp_path, f"[f8sub]\n{section}"))


@alone
def test_a_config_without_the_section_is_an_error_that_says_how_to_have_it(tmp_path):
    import f8sub.titan

    config = parsed(tmp_path, "", job='description = "without"')
    with pytest.raises(f8sub.Float8ConfigError, match=r"custom_config_module=f8sub\.titan"):
        converted_by(config)
