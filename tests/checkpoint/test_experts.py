"""Experts are exported as the layers that published checkpoints have, with the codes that forward multiplies."""

import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file

import f8sub
from f8sub.checkpoint.offline import export_checkpoint
from tests.checkpoint.mixtures import (
    BF16,
    EXPERTS,
    HIDDEN,
    WIDE,
    by_expert,
    converted,
    mixture,
    multiplied,
)
from tests.experts.models import OwnExperts, of_transformers
from tests.models import seed_weights
from tests.selection import long_but

EDGES = {"blockwise": 128, "rowwise": 1, "mxfp8": 1, "tensorwise": 0}
"""Rows of a scale of each recipe, 0 for all of a matrix."""

SUFFIX = {"fp8": "weight_scale_inv", "compressed-tensors": "weight_scale"}

KINDS = ("qwen3_moe", "deepseek_v3", "mixtral")


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", long_but(("blockwise", "tensorwise"), tuple(EDGES)))
def test_codes_are_forwards_and_names_those_of_published_checkpoints(kind, recipe):
    model = converted(kind, recipe)
    expected = by_expert(kind, multiplied(model), EDGES[recipe])
    state, config = f8sub.float8_state_dict(model, dtype=BF16)
    suffix = SUFFIX[config["quant_method"]]
    assert len(expected) == 3 * EXPERTS
    for layer, (codes, scale) in expected.items():
        assert same(state[f"{layer}.weight"], codes), layer
        found = state[f"{layer}.{suffix}"]
        scale = scale.expand(len(codes), 1) if recipe == "tensorwise" else scale
        assert torch.equal(found, scale.contiguous().view(found.dtype)), layer
    ignored = config.get("modules_to_not_convert", config.get("ignore"))
    assert not any("experts" in name for name in ignored)


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_those_that_transformers_saves(kind, tmp_path):
    mixture(kind).save_pretrained(tmp_path)
    saved = set(load_file(tmp_path / "model.safetensors"))
    state, _ = f8sub.float8_state_dict(converted(kind, "blockwise"), dtype=BF16)
    assert {name for name in state if not name.endswith("_scale_inv")} == saved


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise"])
def test_transformers_reads_the_trainings_values(kind, recipe, tmp_path):
    model = converted(kind, recipe)
    expected = multiplied(model)
    f8sub.save_float8(model, tmp_path / "out")
    reads = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=BF16, **(reads if recipe == "rowwise" else {})
    )
    experts = loaded.model.layers[0].mlp.experts
    for name, weight in (("gate_up", experts.gate_up_proj), ("down", experts.down_proj)):
        codes, scale = expected[name]
        if recipe == "blockwise":
            scale = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
        assert torch.equal(weight, (codes.float() * scale).to(BF16)), name


APART = {"*.mlp.*": "rowwise", "*": "blockwise"}


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8", APART], ids=str)
def test_compressed_tensors_reads_codes_times_scales(recipe):
    """Of layers and experts, and where two recipes make two groups."""
    state, config = f8sub.float8_state_dict(
        converted("deepseek_v3", recipe), "compressed-tensors", dtype=BF16
    )
    parsed = QuantizationConfig.model_validate(config)
    assert len(parsed.config_groups) == (2 if recipe is APART else 1)
    layers = [name.removesuffix(".weight_scale") for name in state if name.endswith(".weight_scale")]
    assert sum(".experts." in layer for layer in layers) == 3 * EXPERTS < len(layers)
    for layer in layers:
        groups = parsed.config_groups.values()
        (scheme,) = (each for each in groups if each.targets == ["Linear"] or layer in each.targets)
        codes, scale = state[f"{layer}.weight"], state[f"{layer}.weight_scale"]
        compressor = BaseCompressor.get_value_from_registry(scheme.format or parsed.format)
        found = compressor.decompress({"weight": codes, "weight_scale": scale}, scheme)["weight"]
        if scale.dtype == torch.uint8:
            scale = torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.int() - 127)
        for dim in (0, 1):
            scale = scale.repeat_interleave(codes.shape[dim] // scale.shape[dim], dim)
        assert torch.equal(found.to(BF16), (codes.float() * scale).to(BF16)), layer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise"])
def test_load_float8_reads_them_back(kind, recipe, tmp_path):
    """Experts that learn get the values; the next export, of weights that are cast again, has the same values."""
    model = converted(kind, recipe)
    f8sub.save_float8(model, tmp_path / "out")
    again = f8sub.convert_to_float8(seed_weights(mixture(kind)), recipe=recipe, experts=True)
    f8sub.load_float8(again, tmp_path / "out")
    expected, found = multiplied(model), multiplied(again)
    for name, (codes, scale) in expected.items():
        for dim in (1, 2):
            scale, of_found = (
                each if each.shape[dim] in (1, codes.shape[dim]) else each.repeat_interleave(128, dim)
                for each in (scale, found[name][1])
            )
            found[name] = found[name][0], of_found
        assert torch.equal(found[name][0].float() * found[name][1], codes.float() * scale), name


def served_by_vllm(state: dict[str, torch.Tensor], scale: str, at: str) -> dict[str, torch.Tensor]:
    """What vLLM's and SGLang's FusedMoE loads, by the rule of ``make_expert_params_mapping`` of both.

    A tensor ``experts.{e}.gate_proj.SUFFIX`` fills the first half of ``w13_SUFFIX[e]``, up_proj the second one, and
    down_proj all of ``w2_SUFFIX[e]``. Shapes are those that ``Fp8MoEMethod.create_weights`` makes with blocks, and
    ``CompressedTensorsW8A8Fp8MoEMethod`` with channels.
    """
    blocks = scale == "weight_scale_inv"
    rows, cols = (lambda n: -(-n // 128), lambda k: -(-k // 128)) if blocks else (lambda n: n, lambda k: 1)
    made = {
        "w13_weight": torch.zeros(EXPERTS, 2 * WIDE, HIDDEN, dtype=torch.float8_e4m3fn),
        "w2_weight": torch.zeros(EXPERTS, HIDDEN, WIDE, dtype=torch.float8_e4m3fn),
        f"w13_{scale}": torch.zeros(EXPERTS, 2 * rows(WIDE), cols(HIDDEN)),
        f"w2_{scale}": torch.zeros(EXPERTS, rows(HIDDEN), cols(WIDE)),
    }
    for expert in range(EXPERTS):
        for suffix in ("weight", scale):
            w13, w2 = made[f"w13_{suffix}"][expert], made[f"w2_{suffix}"][expert]
            gate, up, down = (
                state[f"{at}.{expert}.{name}.{suffix}"] for name in ("gate_proj", "up_proj", "down_proj")
            )
            w13[: len(w13) // 2].copy_(gate)
            w13[len(w13) // 2 :].copy_(up)
            w2.copy_(down)
            for source, target in ((gate, w13[: len(w13) // 2]), (up, w13[len(w13) // 2 :]), (down, w2)):
                assert source.dtype == target.dtype
                assert source.shape == target.shape
    return made


@pytest.mark.parametrize(
    ("recipe", "scale"), [("blockwise", "weight_scale_inv"), ("rowwise", "weight_scale")]
)
def test_engines_fuse_them_to_what_training_multiplies(recipe, scale):
    model = converted("qwen3_moe", recipe)
    expected = multiplied(model)
    state, _ = f8sub.float8_state_dict(model, dtype=BF16)
    served = served_by_vllm(state, scale, "model.layers.0.mlp.experts")
    for engines, ours in (("w13", "gate_up"), ("w2", "down")):
        assert same(served[f"{engines}_weight"], expected[ours][0])
        assert torch.equal(served[f"{engines}_{scale}"], expected[ours][1])


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
@pytest.mark.parametrize("stored", ["by expert", "fused"])
def test_a_finished_checkpoint_has_the_same_codes(recipe, stored, tmp_path):
    model = converted("qwen3_moe", recipe)
    plain = mixture("qwen3_moe")
    if stored == "fused":
        (tmp_path / "in").mkdir()
        save_file(plain.state_dict(), tmp_path / "in" / "model.safetensors")
        (tmp_path / "in" / "config.json").write_text(json.dumps(plain.config.to_dict(), default=str))
    else:
        plain.save_pretrained(tmp_path / "in")
    export_checkpoint(tmp_path / "in", tmp_path / "out", plain.to("meta"), recipe=recipe, experts=True)
    f8sub.save_float8(model, tmp_path / "own", dtype=BF16)
    found, own = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "own"))
    assert found.keys() == own.keys()
    assert all(same(found[name], own[name]) for name in own)


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_experts_and_routers_that_stay_in_high_precision_are_named(kind):
    """In full and nothing else, of a layer that has the number of an expert, too."""
    model = f8sub.convert_to_float8(mixture(kind, layers=2), recipe="blockwise")
    state, config = f8sub.float8_state_dict(model, layout="compressed-tensors", dtype=BF16)
    named = {f"model.layers.{layer}.mlp.{leaf}" for layer in range(2) for leaf in ("gate", "experts")}
    assert set(config["ignore"]) == {*named, "lm_head"}
    layer = "model.layers.1.mlp.experts.3.up_proj"
    assert torch.equal(state[f"{layer}.weight"], model.model.layers[1].mlp.experts.gate_up_proj[3, WIDE:])
    assert f"{layer}.weight_scale" not in state


@pytest.mark.parametrize("recipe", ["mxfp8", "blockwise"])
def test_experts_that_transformers_cannot_read_are_a_warning(recipe, tmp_path):
    """When it reads them, this test fails, and the warning goes."""
    out, reads = tmp_path / "out", transformers.CompressedTensorsConfig(dequantize=True)
    with pytest.warns(f8sub.Float8Warning, match="and transformers 5.23 fails to read them"):
        f8sub.save_float8(converted("qwen3_moe", recipe), out, layout="compressed-tensors", dtype=BF16)
    with pytest.raises(RuntimeError, match="during automatic conversion"):
        transformers.AutoModelForCausalLM.from_pretrained(out, dtype=BF16, quantization_config=reads)


def test_histories_of_delayed_scaling_are_left_out():
    found, expected = (
        f8sub.float8_state_dict(converted("qwen3_moe", recipe), dtype=BF16)[0]
        for recipe in ("delayed", "tensorwise")
    )
    assert found.keys() == expected.keys()


@pytest.mark.parametrize(("recipe", "is_told"), [("rowwise", True), ("blockwise", False)])
def test_experts_of_llama_4_that_transformers_begins_anew_are_a_warning(recipe, is_told, tmp_path):
    """When it reads them, this test fails, and the warning goes."""
    config = transformers.Llama4TextConfig(
        vocab_size=64, hidden_size=128, intermediate_size=128, intermediate_size_mlp=128, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, head_dim=32, num_local_experts=2, pad_token_id=0,
    )  # fmt: skip
    model = f8sub.convert_to_float8(transformers.Llama4ForCausalLM(config).to(BF16), recipe=recipe)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        f8sub.save_float8(model, tmp_path / "out", dtype=BF16)
    assert [str(each.message)[:17] for each in told if each.category is f8sub.Float8Warning] == (
        ["Llama4TextExperts"] if is_told else []
    )
    reads = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if is_told else {}
    loaded = transformers.Llama4ForCausalLM.from_pretrained(tmp_path / "out", dtype=BF16, **reads)
    found = loaded.model.layers[0].feed_forward.experts
    assert hasattr(found, "down_proj") is not is_told
    if not is_told:
        assert torch.equal(found.down_proj, model.model.layers[0].feed_forward.experts.down_proj)


def test_experts_that_checkpoints_keep_in_one_tensor_stay_in_high_precision():
    """gpt-oss: no layer of an expert has a name."""
    model = f8sub.convert_to_float8(of_transformers("gpt_oss"), recipe="rowwise", experts=True)
    state, config = f8sub.float8_state_dict(model, dtype=BF16)
    assert "model.layers.0.mlp.experts" in config["ignore"]
    assert state["model.layers.0.mlp.experts.down_proj"].dtype == BF16


def test_a_gate_that_ends_within_a_block_is_refused_and_nothing_is_written(tmp_path: Path):
    model = converted("qwen3_moe", "blockwise", wide=192)
    with pytest.raises(
        f8sub.Float8ConfigError, match=r"experts\.0\.up_proj: it is rows from 192 on .* blocks of 128"
    ):
        f8sub.save_float8(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_experts_of_a_user_are_layers_by_their_weights_names():
    f8sub.register_experts(OwnExperts)
    model = torch.nn.ModuleDict({"moe": OwnExperts(3, 128, 256), "head": torch.nn.Linear(128, 32)})
    f8sub.convert_to_float8(model, "blockwise", experts=True)
    state, _ = f8sub.float8_state_dict(model, dtype=BF16)
    expected = f8sub.quantize(model["moe"].up[1].detach().to(BF16), "blockwise", "w").rowwise
    assert same(state["moe.1.up.weight"], expected.data)
    renamed = dict(
        f8sub.float8_weights(model, dtype=BF16, rename=lambda name: name.replace("moe.", "experts."))
    )
    assert torch.equal(renamed["experts.1.up.weight_scale_inv"], expected.scale_inv)
