"""What torchtitan's converters are asked, of f8sub's: config trees, its command line, LoRA, checkpoints' keys."""

import copy
import pickle
from typing import Any

import pytest
import torch

import f8sub
from f8sub import get_recipe
from f8sub.integrations.torchtitan.options import Options
from tests.integrations.torchtitan.runs import alone

DENSE = ("attention.qkv_linear.wqkv", "attention.wo", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")


def on_meta(config: Any) -> torch.nn.Module:
    """A model as the trainer builds it."""
    with torch.device("meta"):
        model = config.build()
    model.verify_module_protocol()
    return model


def converted(model: torch.nn.Module) -> list[str]:
    return [fqn for fqn, layer in model.named_modules() if isinstance(layer, f8sub.Float8Linear)]


def debugmodel(*converters: Any, flavor: str = "debugmodel") -> Any:
    from torchtitan.models.llama3 import model_registry

    return model_registry(flavor, converters=list(converters)).model


def converter(**options: Any) -> Any:
    from f8sub import titan

    return titan.Float8Converter.Config(**options)


def plain_linears(config: Any) -> bool:
    from torchtitan.models.common.linear import Linear

    return all(type(found) is Linear.Config for _, found, _, _ in config.traverse(Linear.Config))


@alone
def test_nothing_is_converted_by_default():
    from torchtitan.config import ConfigManager

    import f8sub.titan  # noqa: F401

    config = ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel"])
    assert converted(on_meta(config.model_spec.model)) == []


@alone
@pytest.mark.parametrize("recipe", f8sub.recipe_names())
def test_every_recipe_converts_the_blocks_and_not_the_head(recipe):
    config = debugmodel(converter(recipe_name=recipe))
    model = on_meta(config)
    assert sorted(converted(model)) == sorted(f"layers.{i}.{name}" for i in range(6) for name in DENSE)
    layer = model.layers["0"].feed_forward.w1
    assert layer._f8sub.plan.recipe == get_recipe(recipe)
    assert layer._f8sub.float8_all_gather == (None not in get_recipe(recipe).formats("w"))
    assert plain_linears(config)
    assert len({id(model.get_submodule(fqn)._f8sub.conversion) for fqn in converted(model)}) == 1


@alone
@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("llama3_debugmodel_f8sub", {"lm_head"}),
        ("qwen3_debugmodel_f8sub", {"lm_head"}),
        ("qwen3_moe_debug_f8sub", {"lm_head", "router.gate"}),
        ("deepseek_v3_debugmodel_f8sub", {"lm_head", "router.gate"}),
    ],
)
def test_ready_made_configs_of_other_models_too(name, left):
    from f8sub import titan

    report = f8sub.conversion_report(on_meta(getattr(titan, name)().model_spec.model))
    assert {".".join(la.fqn.split(".")[-2:]) for la in report.layers if not la.converted} == left


@alone
@pytest.mark.parametrize("name", ["llama3_8b", "llama3_70b", "llama3_405b", "qwen3_32b", "deepseek_v3_16b"])
def test_large_ready_made_configs_are_torchtitans_own_with_float8(name):
    from torchtitan.components.quantization import float8
    from torchtitan.models.deepseek_v3 import config_registry as deepseek_v3
    from torchtitan.models.llama3 import config_registry as llama3
    from torchtitan.models.qwen3 import config_registry as qwen3

    from f8sub import titan

    float8.has_cuda_capability = lambda *_: True  # torchtitan's own float8, in its 405B, asks for it
    stock = next(getattr(each, name)() for each in (llama3, qwen3, deepseek_v3) if hasattr(each, name))
    config = getattr(titan, f"{name}_f8sub")()
    assert isinstance(config.model_spec.model, type(stock.model_spec.model))
    fields = ("training", "parallelism", "optimizer", "lr_scheduler", "hf_assets_path", "checkpoint", "loss")
    for field in (*fields, "activation_checkpoint"):
        assert getattr(config, field) == getattr(stock, field), field
    assert "float8" in config.model_spec.model.to_dict()
    assert plain_linears(config.model_spec.model)


@alone
def test_filters_leave_layers_alone_and_the_head_is_converted_on_request():
    model = on_meta(debugmodel(converter(filter_fqns=["attention", "layers.0."])))
    assert sorted(converted(model)) == sorted(f"layers.{i}.{n}" for i in range(1, 6) for n in DENSE[2:])
    assert "lm_head" in converted(on_meta(debugmodel(converter(skip_defaults=False))))


@alone
def test_the_small_ones_on_request():
    small = converter(recipe_name="tensorwise", filter_fqns=["auto_filter_small_kn"])
    found = converted(on_meta(debugmodel(small, flavor="8B")))
    assert "layers.0.attention.qkv_linear.wqkv" in found
    with pytest.raises(f8sub.Float8ConfigError, match="nothing to convert"):
        on_meta(debugmodel(small))  # its layers are all of 256 and 768


@alone
def test_the_command_line_alone():
    from torchtitan.config import ConfigManager
    from torchtitan.config.override import apply_overrides

    from f8sub.integrations.torchtitan import hooks

    config = ConfigManager().parse_args(
        [
            *("--module", "qwen3", "--config", "qwen3_debugmodel", "--override.imports"),
            'f8sub.titan.float8={"recipe_name": "rowwise", "filter_fqns": ["attention"]}',
            "f8sub.titan.precompute_scales",
        ]
    )
    taken = config.model_spec.model  # before overrides, as the trainer does
    apply_overrides(config.override, config)
    model = on_meta(taken)
    assert {fqn.split(".")[-1] for fqn in converted(model)} == {"w1", "w2", "w3"}
    assert model.layers["0"].feed_forward.w1._f8sub.plan.recipe.name == "rowwise"
    model.to_empty(device="cpu")
    optimizers = config.optimizer.build(model_parts=[model])
    assert optimizers in hooks._attached
    hooks.attach(optimizers, [model])  # a config with post_optimizer_build_fn would
    assert len(optimizers._optimizer_step_post_hooks) == 1


@alone
def test_what_a_spec_did_after_building_optimizers_is_done_first():
    import dataclasses

    from torchtitan.models.llama3 import model_registry

    from f8sub import titan

    done = []
    spec = model_registry("debugmodel")
    spec = dataclasses.replace(spec, post_optimizer_build_fn=lambda *given: done.append(given))
    spec = titan.with_float8(spec)
    model = on_meta(spec.model).to_empty(device="cpu")
    optimizer = torch.optim.SGD(model.parameters())
    spec.post_optimizer_build_fn(optimizer, [model], None)
    assert done == [(optimizer, [model], None)]
    assert len(optimizer._optimizer_step_post_hooks) == 1


@alone
def test_lora_after_the_converter_trains_adapters_in_high_precision_over_float8():
    from torchtitan.components.lora import LoRAConverter

    lora = LoRAConverter.Config(rank=16, alpha=16.0, target_modules=["wo"])
    model = on_meta(debugmodel(converter(emulate=True), lora))
    assert len(converted(model)) == 30
    layer = model.layers["0"].attention.wo
    assert isinstance(layer, f8sub.Float8Linear)
    assert type(layer.lora_a).__name__ == "Linear"
    assert not layer.weight.requires_grad
    assert layer.lora_b.weight.requires_grad

    model.to_empty(device="cpu")
    model.init_weights(buffer_device=None)
    torch.nn.init.normal_(layer.lora_b.weight)
    x = torch.randn(32, 256)
    got = layer(x)
    in_float8 = f8sub.Float8Linear.forward(layer, x)
    assert torch.equal(got, in_float8 + layer._lora_scaling * layer.lora_b(layer.lora_a(x)))
    assert not torch.equal(in_float8, torch.nn.functional.linear(x, layer.weight.plain))


@alone
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"recipe_name": "tensorwize"}, r"tensorwize.*tensorwise"),
        ({"recipe_name": {"layers": "nope"}}, r"nope"),
        ({"filter_fqns": ["output"]}, r"output.*lm_head"),
        ({"filter_fqns": ["layers"]}, r"nothing to convert"),
        ({"filter_fqns": "lm_head"}, r"\['lm_head'\]"),
        (
            {"enable_fsdp_float8_all_gather": False, "precompute_float8_dynamic_scale_for_fsdp": True},
            r"enable_fsdp_float8_all_gather=False",
        ),
    ],
)
def test_a_mistake_is_an_error_when_the_model_is_built(options, says):
    with pytest.raises(f8sub.Float8ConfigError, match=says):
        on_meta(debugmodel(converter(**options)))


@alone
def test_scales_without_float8_or_of_a_weight_that_is_f8subs_no_more_are_an_error():
    from torchtitan.components.optimizer import default_adamw

    from f8sub import titan

    configs = debugmodel(), debugmodel(converter())
    plain, model = (on_meta(config).to_empty(device="cpu") for config in configs)
    lost = model.layers["4"].feed_forward.w2
    lost.weight = torch.nn.Parameter(lost.weight.plain.clone())
    config = titan.precompute_scales(default_adamw(lr=1e-3))
    with pytest.raises(f8sub.Float8ConfigError, match=r"f8sub\.titan\.float8"):
        config.build(model_parts=[plain])
    with pytest.raises(
        f8sub.Float8ConfigError,
        match=r"1 of the converted weights \(30 in all\).*layers\.4\.feed_forward\.w2 \(Parameter\)",
    ):
        config.build(model_parts=[model])


@alone
def test_without_hooks_in_the_config_scales_begin_at_the_first_step():
    from torchtitan.components.optimizer import default_adamw

    model = on_meta(debugmodel(converter())).to_empty(device="cpu")
    model.init_weights(buffer_device=None)  # empty memory may hold NaN, which is told
    optimizers = default_adamw(lr=1e-3).build(model_parts=[model])
    assert not optimizers._optimizer_step_post_hooks
    optimizers.step()
    assert len(optimizers._optimizer_step_post_hooks) == 1
    optimizers.step()
    assert len(optimizers._optimizer_step_post_hooks) == 1

    quiet = on_meta(debugmodel(converter(precompute_float8_dynamic_scale_for_fsdp=False)))
    optimizers = default_adamw(lr=1e-3).build(model_parts=[quiet.to_empty(device="cpu")])
    optimizers.step()
    assert not optimizers._optimizer_step_post_hooks


@alone
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "nvfp4"])
def test_checkpoints_have_the_stock_models_keys(recipe):
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    config = debugmodel(converter(recipe_name=recipe))
    model = on_meta(config).to_empty(device="cpu")
    model.init_weights(buffer_device=None)
    stock = on_meta(debugmodel()).to_empty(device="cpu")
    stock.init_weights(buffer_device=None)
    own = {key for key in model.state_dict() if ".scaling_states." not in key}
    assert own == set(stock.state_dict())
    assert recipe == "delayed" or own == set(model.state_dict())

    loaded = model.load_state_dict(stock.state_dict(), strict=recipe != "delayed")
    assert all(".scaling_states." in key for key in loaded.missing_keys)
    weights = {key: model.state_dict()[key] for key in own}
    assert all(torch.equal(weights[key], value) for key, value in stock.state_dict().items())
    stock.load_state_dict(weights)
    assert "model.layers.0.mlp.gate_proj.weight" in Llama3StateDictAdapter(config, None).to_hf(weights)
    assert b"f8sub" not in pickle.dumps(weights)


@alone
def test_copies_pickles_and_the_way_back():
    """A copy, as for a pipeline stage, is a conversion of its own."""
    from torchtitan.models.common.linear import Linear

    model = on_meta(debugmodel(converter()))
    layer = model.layers["0"].feed_forward.w1
    stage = copy.deepcopy(model)
    copied = stage.layers["0"].feed_forward.w1
    assert type(copied) is type(layer)
    assert copied._f8sub.conversion is not layer._f8sub.conversion
    assert len(copied._f8sub.conversion.records) == 30
    assert stage._f8sub_precompute_scales

    copied.to_empty(device="cpu")
    torch.nn.init.normal_(copied.weight)
    again = pickle.loads(pickle.dumps(copied))
    x = torch.randn(16, 256)
    assert type(again) is type(copied)
    assert torch.equal(again(x), copied(x))

    assert converted(f8sub.convert_from_float8(model)) == []
    assert type(model.layers["0"].feed_forward.w1) is Linear


@alone
def test_torchtitans_operator_for_tensor_parallel_parts_keeps_the_weight_f8subs():
    import spmd_types  # noqa: F401

    weight = on_meta(debugmodel(converter())).layers["0"].feed_forward.w1.weight
    part = torch.ops.spmd_types.replicate_to_varying(weight, 2, 0, 1, False)
    assert type(part) is type(weight)
    assert part.shape == (384, 256)
    assert part.cell is not weight.cell


def test_defaults_switch_everything_on():
    assert Options() == Options(recipe_name="tensorwise")
    assert Options().precompute
    assert not Options(enable_fsdp_float8_all_gather=False).precompute
