"""Options of recipes, of what is kept of x and of fused feed-forwards, as torchtitan 0.3's users say them."""

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import f8sub
from f8sub import feed_forward
from f8sub.feed_forward import FusedFeedForward
from f8sub.integrations.torchtitan.options import Options
from f8sub.norm import FusedNorm
from tests.titan import runs
from tests.titan.runs import alone
from tests.titan.test_converter import converted, converter, debugmodel, on_meta
from tests.titan.test_training import COMPILED, MESHES, NVFP4, last, long, mesh, of_torch_2_14

FUSED = 'f8sub:{"fuse_producers":true}'


def from_the_command_line(*options: str) -> Any:
    """The model of a command line's config, built as the trainer does."""
    from torchtitan.config import ConfigManager
    from torchtitan.config.override import apply_overrides

    config = ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel", *options])
    taken = config.model_spec.model  # before overrides, as the trainer does
    apply_overrides(config.override, config)
    return on_meta(taken)


def recipe_of(model: torch.nn.Module, name: str = "feed_forward.w1") -> f8sub.Recipe:
    return model.layers["0"].get_submodule(name).plan.recipe


RECIPES = {
    "delayed": {"margin": 2, "amax_history_len": 16, "amax_compute_algo": "most_recent"},
    "gridquant": {"block": 128, "dy": "float8_e4m3fn"},
    "nvfp4": {"stochastic_rounding": True, "hadamard": True},
    "blockwise": {"power_of_2_scales": False},
}


@alone
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipes_options_on_the_command_line(name):
    given = RECIPES[name]
    said = json.dumps({"recipe_name": name, "recipe_options": given})
    recipe = recipe_of(from_the_command_line("--override.imports", f"f8sub.titan.float8={said}"))
    expected = {key: torch.float8_e4m3fn if key == "dy" else value for key, value in given.items()}
    assert recipe == f8sub.get_recipe(name, **expected)
    assert recipe != f8sub.get_recipe(name)


@alone
def test_all_three_together():
    said = {
        "recipe_name": {"feed_forward": "delayed", "*": "gridquant"},
        "recipe_options": {"delayed": {"margin": 1.5}, "gridquant": {"block": 64}},
        "keep_x": {"wo": "high_precision"},
        "fuse_producers": True,
    }
    model = from_the_command_line("--override.imports", f"f8sub.titan.float8={json.dumps(said)}")
    assert recipe_of(model) == f8sub.get_recipe("delayed", margin=1.5)
    assert recipe_of(model, "attention.wo") == f8sub.get_recipe("gridquant", block=64)
    assert model.layers["0"].attention.wo.keep_x == "high_precision"
    assert all(isinstance(layer.feed_forward, FusedFeedForward) for layer in model.layers.values())


@alone
def test_a_recipe_of_the_leading_layers_alone():
    """As torchtitan's configs of nvfp4 leave their last layers, and no pattern matches what has no number."""
    model = on_meta(debugmodel(converter(recipe_name={"layers.[0-4]": "nvfp4"})))
    found = {fqn.split(".")[1] for fqn in converted(model)}
    assert found == {"0", "1", "2", "3", "4"}
    assert len(converted(model)) == 5 * 5


@alone
@pytest.mark.parametrize("option", ["recipe_name", "keep_x"])
def test_a_pattern_that_decides_for_no_layer_is_named(option):
    idle = {"feed_forward.w4": {"recipe_name": "rowwise", "keep_x": "float8"}[option]}
    rest = {"recipe_name": {"*": "tensorwise"}, "keep_x": {}}[option]
    with pytest.warns(f8sub.Float8Warning, match=r"feed_forward\.w4.*matches no linear layer"):
        on_meta(debugmodel(converter(**{option: {**idle, **rest}})))


@alone
def test_in_code_options_are_any_values_and_configs_are_json_all_the_same():
    def largest(history: torch.Tensor) -> torch.Tensor:
        return history.amax(0)

    for name, given in (
        ("gridquant", {"dy": torch.float8_e4m3fn}),
        ("delayed", {"amax_compute_algo": largest}),
    ):
        config = debugmodel(converter(recipe_name=name, recipe_options=given))
        assert recipe_of(on_meta(config)) == f8sub.get_recipe(name, **given)
        said = json.loads(json.dumps(config.to_dict()))["float8"]
        assert said["recipe_name"] == name
        assert said["recipe_options"].keys() == given.keys()
    recipe = f8sub.get_recipe("delayed", margin=3)
    assert recipe_of(on_meta(debugmodel(converter(recipe_name=recipe)))) == recipe


@alone
@pytest.mark.parametrize(
    ("config", "fused", "norms"),
    [
        ("llama3_debugmodel", 6, 12),
        ("qwen3_debugmodel", 8, 16),
        ("qwen3_moe_debug", 0, 8),
        ("deepseek_v3_debugmodel", 6, 13),
    ],
)
def test_whose_feed_forwards_and_norms_are_fused(config, fused, norms):
    """Of a mixture the dense layers, the experts that all tokens share, and norms that float8 layers alone read."""
    from f8sub import titan

    made = getattr(titan, f"{config}_f8sub")().model_spec.model
    titan.float8(made, fuse_producers=True)
    modules = list(on_meta(made).modules())
    assert sum(isinstance(module, FusedFeedForward) for module in modules) == fused
    assert sum(isinstance(module, FusedNorm) for module in modules) == norms


@alone
def test_a_copy_for_a_pipeline_stage_parallelizes_itself():
    model = on_meta(debugmodel(converter(fuse_producers=True)))
    copied, original = (made.layers["0"].feed_forward for made in (copy.deepcopy(model), model))
    parallel_dims = SimpleNamespace(tp_enabled=False)
    for name in copied.roles:
        getattr(copied, name).forward = getattr(original, name).forward = len
    copied._sharding_config = copied.w1._sharding_config = None
    copied.w2._sharding_config = copied.w3._sharding_config = None
    copied.parallelize(parallel_dims)
    assert copied._parallelized
    assert not original._parallelized
    assert not any("forward" in vars(getattr(copied, name)) for name in copied.roles)
    assert all("forward" in vars(getattr(original, name)) for name in original.roles)


MISTAKES = [
    ({"recipe_name": "delayed", "recipe_options": {"margn": 2}}, r"margn.*it has \['margin'"),
    ({"recipe_name": "delayed", "recipe_options": {"margin": "2"}}, r"margin is .* got '2'"),
    ({"recipe_name": "delayed", "recipe_options": {"fp8_format": ["E4M3"]}}, r"'fp8_format': \['E4M3'\]"),
    ({"recipe_name": "gridquant", "recipe_options": {"block": 0}}, r"'block': 0.*'gridquant'"),
    ({"recipe_name": "gridquant", "recipe_options": {"dy": "float8"}}, r"'dy': 'float8'.*float8_e5m2"),
    ({"recipe_name": "nvfp4", "recipe_options": {"hadamard": "yes"}}, r"hadamard .*True or False.*'yes'"),
    ({"recipe_options": {"block": 128}}, r"'tensorwise' has no options \['block'\]"),
    ({"recipe_options": [2]}, r"recipe_options=\[2\] is no mapping"),
    ({"recipe_name": {"*": "delayed"}, "recipe_options": {"margin": 2}}, r"'margin': 2; .*\['delayed'\]"),
    ({"recipe_name": {"*": "delayed"}, "recipe_options": {"nvfp4": {}}}, r"'nvfp4': \{\}; .*\['delayed'\]"),
    ({"keep_x": "float16"}, r"keep_x='float16' is none of 'auto'"),
]


@pytest.mark.parametrize(("options", "says"), MISTAKES)
def test_a_mistake_names_the_option(options, says):
    with pytest.raises(f8sub.Float8ConfigError, match=says):
        Options(**options)


@alone
def test_a_mistake_on_the_command_line_is_an_error_before_a_model_is_built():
    said = json.dumps(MISTAKES[0][0])
    with pytest.raises(Exception, match="margn") as raised:
        from_the_command_line("--override.imports", f"f8sub.titan.float8={said}")
    errors = [raised.value]
    while errors[-1] is not None:
        errors.append(errors[-1].__cause__ or errors[-1].__context__)
    assert any(isinstance(error, f8sub.Float8ConfigError) for error in errors)


@alone
def test_feed_forwards_that_cannot_be_fused_are_an_error_when_the_model_is_built():
    wrong = converter(recipe_name={"w1": "rowwise", "*": "tensorwise"}, fuse_producers=True)
    with pytest.raises(f8sub.Float8ConfigError, match=r"feed_forward.*give both one recipe"):
        on_meta(debugmodel(wrong))


@long
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("delayed", {"margin": 3, "amax_history_len": 2}),
        ("gridquant", {"block": 64}),
        ("nvfp4", {"hadamard": True}),
    ],
)
def test_a_recipes_options_train(train, name, options):
    said = json.dumps({"recipe_name": name, "recipe_options": options}, separators=(",", ":"))
    default = NVFP4 if name == "nvfp4" else f'f8sub:{{"recipe_name":"{name}"}}'
    ours = train(2, f"f8sub:{said}")
    assert ours != train(2, default)
    assert abs(last(ours) - last(train(2, "bf16"))) < 4e-3


@pytest.mark.parametrize("mesh", [mesh(name) for name in ("fsdp2", "tp2", "spmd-fsdp2", "spmd-tp2", "cp2")])
def test_fusing_changes_no_bit(train, mesh):
    world, options = MESHES[mesh]
    assert train(world, f"{FUSED} {options}") == train(world, f"f8sub {options}")


@long
@pytest.mark.parametrize("more", [',"recipe_name":"delayed"', ',"keep_x":{"wo":"high_precision"}'])
def test_fusing_changes_no_bit_of_other_options(train, more):
    plain = f"f8sub:{{{more[1:]}}}"
    fused = f'f8sub:{{"fuse_producers":true{more}}}'
    assert train(2, fused) == train(2, plain)
    assert train(2, f"{fused} {COMPILED}") == train(2, plain)


@long
def test_fusing_changes_no_bit_of_checkpointed_blocks(train):
    fused = 'f8sub_selective_ac:{"fuse_producers":true}'
    assert train(2, fused) == train(2, "f8sub")
    assert train(2, f"{fused} {COMPILED}") == train(2, "f8sub")


def fused_forwards(rank: int, world: int, arguments: list[str], folder: Any) -> int:
    """How many forwards of feed-forwards were one function, in a run of two steps."""
    forward, calls = feed_forward._forward, []
    feed_forward._forward = lambda *given, **keep: calls.append(1) or forward(*given, **keep)
    try:
        runs.train(rank, world, [*arguments, "training.steps=2"], folder)
    finally:
        feed_forward._forward = forward
    return len(calls)


@long
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fsdp2", 2 * 2),
        ("fsdp2 full_ac", 2 * 2 * 2),
        ("tp2", 0),
        pytest.param("spmd-fsdp2", 2 * 2, marks=of_torch_2_14),
        pytest.param("spmd-tp2", 0, marks=of_torch_2_14),
        pytest.param("cp2", 2 * 2, marks=of_torch_2_14),
    ],
)
def test_where_they_run_as_one_function(titan, assets, name, expected):
    """Two layers, two steps; with tensor parallelism each layer is to be seen by itself."""
    name, _, ac = name.partition(" ")
    world, options = MESHES[name]
    config = f'f8sub_{ac}:{{"fuse_producers":true}}' if ac else FUSED
    assert titan(world, fused_forwards, f"{config} {options}".split(), assets) == [expected] * world
