"""Models that transformers dequantized from a quantized checkpoint are exported under the names of their own class."""

import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config
from transformers.quantizers.base import HfQuantizer

import f8sub
from tests.checkpoint.files import block_scales, spread
from tests.checkpoint.mixtures import BF16, mixture

MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


def quantized(kind: str, folder: Path) -> tuple[Path, set[str]]:
    """A checkpoint as it is published, and the names that a model of its class has in one without quantization."""
    model = gpt_oss() if kind == "mxfp4" else mixture("qwen3_moe", layers=1)
    if kind == "compressed-tensors":
        model = f8sub.convert_to_float8(model, "rowwise", experts=True)
        f8sub.save_float8(model, folder / kind, dtype=BF16)
        names = {name for name in load_file(folder / kind / "model.safetensors") if "scale" not in name}
        return folder / kind, names
    model.save_pretrained(folder / "plain")
    plain = load_file(folder / "plain" / "model.safetensors")
    tensors = {}
    for name, w in plain.items():
        if kind == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            experts, rows, columns = w.shape
            codes = torch.arange(experts * columns * rows // 2, dtype=torch.int64) * 7 % 251
            tensors[f"{name}_blocks"] = codes.to(torch.uint8).view(experts, columns, rows // 32, 16)
            tensors[f"{name}_scales"] = torch.full((experts, columns, rows // 32), 120, dtype=torch.uint8)
        elif kind != "mxfp4" and name.endswith("_proj.weight"):
            w = w.float()
            scale = block_scales(w, True) if kind == "fp8 blocks" else w.abs().amax() / 448
            spread_out = spread(scale, w.shape) if kind == "fp8 blocks" else scale
            tensors[name] = (w / spread_out).clamp(-448, 448).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
        else:
            tensors[name] = w
    (folder / kind).mkdir()
    save_file(tensors, folder / kind / "model.safetensors", {"format": "pt"})
    block = [128, 128] if kind == "fp8 blocks" else None
    scheme = "dynamic" if block else "static"
    fp8 = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": scheme}
    config = json.loads((folder / "plain" / "config.json").read_text())
    config["quantization_config"] = MXFP4 if kind == "mxfp4" else fp8
    (folder / kind / "config.json").write_text(json.dumps(config))
    return folder / kind, set(plain)


def gpt_oss() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128, "num_local_experts": 4}
    config = transformers.GptOssConfig(num_experts_per_tok=2, layer_types=["full_attention"], **sizes)
    return transformers.GptOssForCausalLM(config).bfloat16()


def dequantized(kind: str, folder: Path) -> torch.nn.Module:
    how = {
        "mxfp4": Mxfp4Config(dequantize=True),
        "compressed-tensors": transformers.CompressedTensorsConfig(dequantize=True),
    }.get(kind, FineGrainedFP8Config(dequantize=True))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=BF16, quantization_config=how)


@pytest.fixture
def rules_stay(monkeypatch):
    """Models keep the rules by which they were loaded, as up to transformers 5.23; 5.24 drops them."""
    remove = HfQuantizer.remove_quantization_config

    def kept(self, model):
        rules = model._weight_conversions
        remove(self, model)
        model._weight_conversions = rules

    monkeypatch.setattr(HfQuantizer, "remove_quantization_config", kept)


@pytest.mark.filterwarnings("ignore:.*came from a quantized checkpoint:f8sub.Float8Warning")
@pytest.mark.usefixtures("rules_stay")
@pytest.mark.parametrize("kind", ["mxfp4", "fp8 blocks", "fp8 tensors", "compressed-tensors"])
def test_names_and_values_are_those_of_the_models_class(kind, tmp_path):
    folder, names = quantized(kind, tmp_path)
    model = dequantized(kind, folder)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    f8sub.convert_to_float8(model, "rowwise", min_dim=0, experts=kind != "mxfp4")
    f8sub.precompute_scales(model)
    state, _ = f8sub.float8_state_dict(model, dtype=BF16)
    assert {name for name in state if not name.endswith("_scale")} == names
    assert {name for name, _ in f8sub.float8_weights(model, dtype=BF16)} == state.keys()
    f8sub.save_float8(model, tmp_path / "out", dtype=BF16)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == state.keys()
    again, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        dtype=BF16,
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
        output_loading_info=True,
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, value in again.state_dict().items():
        error = (value.float() - values[name].float()).norm()
        assert error <= 0.04 * values[name].float().norm(), name
    if kind != "mxfp4":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*a second time", category=f8sub.Float8Warning)
            f8sub.load_float8(model, folder)
        for name, value in model.state_dict().items():
            assert torch.equal(value.to(BF16), values[name]), name


@pytest.mark.usefixtures("rules_stay")
def test_a_model_that_transformers_would_save_unreadably_is_a_warning(tmp_path):
    folder, _ = quantized("fp8 blocks", tmp_path)
    model = dequantized("fp8 blocks", folder)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.warns(f8sub.Float8Warning, match=r"\(Fp8Dequantize\), .*save_original_format=False") as told:
        f8sub.convert_to_float8(model, "blockwise", experts=True)
    assert told[0].filename == __file__
    with pytest.raises(ValueError, match="Undefined Operation"):
        model.save_pretrained(tmp_path / "own")
    model.save_pretrained(tmp_path / "right", save_original_format=False)
    right = AutoModelForCausalLM.from_pretrained(tmp_path / "right", dtype=BF16)
    assert all(torch.equal(value, values[name]) for name, value in right.state_dict().items())
    with warnings.catch_warnings():
        warnings.simplefilter("error", f8sub.Float8Warning)
        f8sub.convert_to_float8(right, "blockwise", experts=True)
