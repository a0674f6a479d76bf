"""Options of recipes, of what is kept of x and of checkpointed blocks, as torchtitan 0.3's users say them."""

import json
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import f8sub
from f8sub.experts import seams
from f8sub.experts.module import Float8Experts
from f8sub.integrations.torchtitan.hooks import KEEP, set_policy
from f8sub.integrations.torchtitan.options import JobTokens, Options, convert, known, tokens_of
from f8sub.weights.weight import is_converted
from tests.counting import Float8Work
from tests.data_sets import gaussian, generator
from tests.integrations.torchtitan.runs import alone
from tests.integrations.torchtitan.test_converter import converter, debugmodel, on_meta


def from_the_command_line(*options: str) -> Any:
    """The model of a command line's config, built as the trainer does."""
    from torchtitan.config import ConfigManager
    from torchtitan.config.override import apply_overrides

    config = ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel", *options])
    taken = config.model_spec.model  # before overrides, as the trainer does
    apply_overrides(config.override, config)
    return on_meta(taken)


def recipe_of(model: torch.nn.Module, name: str = "feed_forward.w1") -> f8sub.Recipe:
    return model.layers["0"].get_submodule(name)._f8sub.plan.recipe


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
    }
    model = from_the_command_line("--override.imports", f"f8sub.titan.float8={json.dumps(said)}")
    assert recipe_of(model) == f8sub.get_recipe("delayed", margin=1.5)
    assert recipe_of(model, "attention.wo") == f8sub.get_recipe("gridquant", block=64)
    assert model.layers["0"].attention.wo._f8sub.keep_x == "high_precision"


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

    cases = (("gridquant", {"dy": torch.float8_e4m3fn}), ("delayed", {"amax_compute_algo": largest}))
    for name, given in cases:
        config = debugmodel(converter(recipe_name=name, recipe_options=given))
        assert recipe_of(on_meta(config)) == f8sub.get_recipe(name, **given)
        said = json.loads(json.dumps(config.to_dict()))["float8"]
        assert said["recipe_name"] == name
        assert said["recipe_options"].keys() == given.keys()
    recipe = f8sub.get_recipe("delayed", margin=3)
    assert recipe_of(on_meta(debugmodel(converter(recipe_name=recipe)))) == recipe


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
    ({"keep_x": "float16"}, r"unknown keep_x 'float16' \(nearest: float8\); choose one of auto"),
    ({"keep_swiglu_input": "fp8"}, r"unknown keep_swiglu_input 'fp8'; choose one of high_precision, float8"),
    ({"attention": "fp8"}, r"unknown attention 'fp8'.*choose one of high_precision, float8, float8_forward"),
    ({"monitor_every": -1}, "monitor_every=-1 is less than 0, which is for none"),
    ({"checkpoint_policy": "all"}, r"unknown keep 'all'; choose one of bf16, gemms"),
]


@pytest.mark.parametrize(("options", "says"), MISTAKES)
def test_a_mistake_names_the_option(options, says):
    with pytest.raises(f8sub.Float8ConfigError, match=says):
        Options(**options)


def test_an_option_that_there_is_not_is_told_with_the_nearest():
    told = r"unknown option of f8sub 'recipe_nam' \(nearest: recipe_name.*\); choose one of recipe_name,"
    with pytest.raises(f8sub.Float8ConfigError, match=told):
        known({"skip": [], "recipe_nam": "rowwise"})
    assert Options(**known({"recipe_name": "rowwise"})).recipe_name == "rowwise"


@alone
@pytest.mark.parametrize(
    ("said", "word"), [(MISTAKES[0][0], "margn"), ({"recipe_nam": "rowwise"}, "nearest: recipe_name")]
)
def test_a_mistake_on_the_command_line_is_an_error_before_a_model_is_built(said, word):
    said = json.dumps(said)
    with pytest.raises(Exception, match=word) as raised:
        from_the_command_line("--override.imports", f"f8sub.titan.float8={said}")
    errors = [raised.value]
    while errors[-1] is not None:
        errors.append(errors[-1].__cause__ or errors[-1].__context__)
    assert any(isinstance(error, f8sub.Float8ConfigError) for error in errors)


@alone
def test_flex_attention_is_an_error_before_the_model_changes():
    told = (
        r"attention='float8': the model's attention is FlexAttention, and f8sub takes scaled_dot_product_att"
    )
    options = Options(attention="float8", emulate=True)
    model = on_meta(debugmodel())
    with pytest.raises(f8sub.Float8ConfigError, match=told):
        convert(model, options, {})
    assert not any(map(is_converted, model.modules()))


def model_of(block: nn.Module, keep: str) -> nn.Module:
    model = nn.Sequential(block)
    setattr(model, KEEP, keep)
    model.register_forward_pre_hook(set_policy)
    return model


def test_a_checkpointed_block_multiplies_nothing_again():
    torch.manual_seed(0)
    block = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    model, products = model_of(checkpoint_wrapper(block), "gemms"), []
    for each in (model, nn.Sequential(checkpoint_wrapper(block))):
        y = each(torch.randn(8, 64))
        with Float8Work() as work:
            y.backward(gaussian((8, 64), generator(1)))
        products.append(work.plain_matmuls)
    assert not model._forward_pre_hooks
    assert products[0] == 3 + 2  # every dw, and a dx of all layers but the first
    assert products[1] >= products[0] + 2  # the recomputation may stop before the last one


def test_a_model_without_checkpointed_blocks_is_refused():
    with pytest.raises(f8sub.Float8ConfigError, match="checkpoint_policy='gemms' is for blocks"):
        model_of(nn.Linear(64, 64), "gemms")(torch.randn(8, 64))


DEGREES = {f"{kind}_parallel_degree": 1 for kind in ("pipeline", "context", "tensor", "expert")}


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ({}, 4 * 2048),
        ({"context_parallel_degree": 2}, 4 * 1024),
        ({"tensor_parallel_degree": 2}, 4 * 2048),
        ({"expert_parallel_degree": 8}, 8 * 4 * 2048),
        ({"expert_parallel_degree": 8, "tensor_parallel_degree": 2}, 4 * 4 * 2048),
        (
            {"expert_parallel_degree": 4, "tensor_parallel_degree": 2, "expert_tensor_parallel_degree": 2},
            16 * 2048,
        ),
        ({"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 1}, 2048),
    ],
)
def test_tokens_that_share_experts(degrees, expected):
    parallelism = types.SimpleNamespace(**DEGREES | degrees)
    found = JobTokens(expected, exchanged="expert_parallel_degree" in degrees)
    assert tokens_of(types.SimpleNamespace(local_batch_size=4, seq_len=2048), parallelism) == found
    if "pipeline_parallel_degree" not in degrees:
        after_0_3 = types.SimpleNamespace(num_tokens_per_microbatch_per_dp_rank=4 * 2048)
        assert tokens_of(after_0_3, parallelism) == found


def test_a_config_of_other_names_has_no_tokens():
    assert tokens_of(types.SimpleNamespace(batch=4), types.SimpleNamespace(**DEGREES)) == JobTokens()
    training = types.SimpleNamespace(local_batch_size=4, seq_len=2048)
    assert tokens_of(training, types.SimpleNamespace()) == JobTokens()


@alone
@pytest.mark.parametrize(
    ("batch", "degree", "options", "words"),
    [
        (16, 1, {}, ""),
        (1, 1, {}, "with 128 tokens per expert"),
        (2, 8, {}, ""),
        # 1.2 times as fast, which is enough without expert parallelism
        (1, 11, {}, "with 1,408 tokens per expert"),
        (1, 1, {"tokens": 65536}, ""),
        (16, 1, {"experts": "false"}, "pass experts=True"),
        (None, 1, {}, "gains from"),
    ],
)
def test_experts_are_converted_by_the_jobs_tokens(batch, degree, options, words):
    """DeepSeek-V3's; ``None`` for a job that is not known when the model is built."""
    from torchtitan.models.deepseek_v3 import config_registry

    from f8sub import titan

    config = config_registry.deepseek_v3_671b()
    del config.model_spec.model.layers[4:]
    config.model_spec = titan.with_float8(config.model_spec, **options)
    config.training.seq_len, config.parallelism.expert_parallel_degree = 4096, degree
    if batch is not None:
        config.training.local_batch_size = batch
        config.model_spec.model.update_from_config(config=config)
    model = on_meta(config.model_spec.model)
    summary = f8sub.conversion_report(model).summary
    assert words in summary
    stays = words and words != "gains from"
    assert stays != any(isinstance(module, Float8Experts) for module in model.modules())
    assert ("gains from" in summary) == (words == "gains from")


def of_torchtitan() -> Any:
    """Its experts, converted, with the same weights every time."""
    from torchtitan.models.common import moe

    plain, rng = (
        moe.GroupedExperts(moe.GroupedExperts.Config(dim=64, hidden_dim=96, num_experts=4)),
        generator(0),
    )
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(gaussian(tuple(parameter.shape), rng) / 8)
    return f8sub.convert_to_float8(torch.nn.Sequential(plain.bfloat16()), "rowwise", experts=True)[0]


def nodes_of(y: torch.Tensor) -> set[str]:
    found, left = set(), [y.grad_fn]
    while left:
        node = left.pop()
        found.add(node.name())
        left += [before for before, _ in node.next_functions if before is not None]
    return found


@alone
def test_experts_of_torchtitan_run_as_one_layer():
    """Which is what they compute by the method that multiplies; what a user registered for them stays."""
    from torchtitan.models.common import moe

    from f8sub.integrations.torchtitan.experts import register_grouped_experts

    before = dict(seams._registered)
    try:
        seams._registered.clear()
        runs, names = [], []
        for register in (lambda: None, register_grouped_experts):
            register()
            experts, x = of_torchtitan(), gaussian((40, 64), generator(1)).bfloat16().requires_grad_()
            y = experts(x, torch.tensor([9, 0, 20, 11]))
            names.append(nodes_of(y))
            dy = gaussian((40, 64), generator(2)).bfloat16()
            runs.append([y, *torch.autograd.grad(y, [x, *experts.parameters()], dy)])
        assert [("GatedMatmulBackward" in each) for each in names] == [False, True]
        assert all(map(torch.equal, *runs))
        f8sub.register_experts(moe.GroupedExperts)
        register_grouped_experts()
        assert of_torchtitan()._f8sub.seam.forward is None
    finally:
        seams._registered.clear()
        seams._registered.update(before)
