"""Frozen experts are a file's own codes, at one byte an element, as Qwen3-MoE's and DeepSeek-V3's files have them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import f8sub
from f8sub.weights.primary_weight import PrimaryWeight
from tests.checkpoint.files import block_scales, spread
from tests.experts.models import SMALL, experts_of

SIZES = {
    **SMALL,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_experts": 3,
    "num_local_experts": 3,
    "head_dim": 64,
}
TOKENS = torch.randint(0, 64, (1, 12), generator=torch.Generator().manual_seed(2))


def plain() -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **SIZES)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")


def frozen(recipe: str = "blockwise", **options: object) -> torch.nn.Module:
    given = {
        "experts": True,
        "primary_weights": True,
        "skip_defaults": False,
        "backend": "reference",
        **options,
    }
    return f8sub.convert_to_float8(plain(), recipe, **given).requires_grad_(False)


def written(folder, power_of_2: bool = False) -> dict[str, torch.Tensor]:
    """A file of the layers that transformers splits experts into, in blocks of 128; its tensors."""
    plain().save_pretrained(folder)
    tensors = {}
    for name, w in load_file(folder / "model.safetensors").items():
        if ".experts." not in name:
            tensors[name] = w
            continue
        w = w.float()
        scale = block_scales(w, power_of_2)
        tensors[name] = (w / spread(scale, w.shape)).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def values_of(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    codes = tensors[name]
    return codes.float() * spread(tensors[f"{name}_scale_inv"], codes.shape)


@pytest.mark.parametrize("power_of_2", [True, False])
def test_codes_and_scales_are_the_files(tmp_path, power_of_2):
    tensors, model = written(tmp_path, power_of_2), frozen()
    f8sub.load_float8(model, tmp_path)
    f8sub.precompute_scales(model)
    (module,) = experts_of(model)
    assert all(isinstance(p, PrimaryWeight) for p in module.parameters())
    for name in ("gate_up_proj", "down_proj"):
        parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else ("down_proj",)
        for expert in range(3):
            names = [f"model.layers.0.mlp.experts.{expert}.{part}.weight" for part in parts]
            found = module._f8sub.rowwise(module, name, torch.bfloat16).of_group(expert)
            codes = torch.cat([tensors[each].view(torch.uint8) for each in names])
            assert torch.equal(found.data.view(torch.uint8), codes)
            assert torch.equal(found.scale_inv, torch.cat([tensors[f"{each}_scale_inv"] for each in names]))
            expected = torch.cat([values_of(tensors, each) for each in names])
            assert torch.equal(getattr(module, name)[expert].clone(), expected.bfloat16())
        data = getattr(module, name).primary.codes.rowwise.data
        assert data.untyped_storage().nbytes() == getattr(module, name).numel()


def test_forward_multiplies_what_high_precision_weights_of_these_values_give(tmp_path):
    """Powers of two: a cast of the values gives them again."""
    written(tmp_path, power_of_2=True)
    model, values = frozen(), frozen(primary_weights=False)
    f8sub.load_float8(model, tmp_path)
    f8sub.load_float8(values, tmp_path)
    assert not any(isinstance(p, PrimaryWeight) for p in values.parameters())
    assert torch.equal(model(TOKENS).logits, values(TOKENS).logits)


def test_a_model_on_meta_and_an_export(tmp_path):
    tensors = written(tmp_path / "in")
    with torch.device("meta"):
        model = plain()
    given = {"experts": True, "primary_weights": True, "skip_defaults": False, "backend": "reference"}
    model = f8sub.convert_to_float8(model, "blockwise", **given).requires_grad_(False)
    f8sub.load_float8(model, tmp_path / "in", device="cpu")
    with pytest.warns(f8sub.Float8Warning, match="no powers of two"):
        state, _ = f8sub.float8_state_dict(model, layout="compressed-tensors", dtype=torch.bfloat16)
    for name in tensors:
        if ".experts." in name and not name.endswith("_scale_inv"):
            assert torch.equal(state[name].view(torch.uint8), tensors[name].view(torch.uint8))
            assert torch.equal(state[f"{name}_scale"], tensors[f"{name}_scale_inv"])


@pytest.mark.parametrize("why", ["learns", "other tiles", "no primary weights"])
def test_other_experts_get_the_values(tmp_path, why):
    tensors = written(tmp_path, power_of_2=True)
    model = frozen(
        "rowwise" if why == "other tiles" else "blockwise", primary_weights=why != "no primary weights"
    )
    (module,) = experts_of(model)
    module.down_proj.requires_grad_(why == "learns")
    if why == "other tiles":
        with pytest.warns(f8sub.Float8Warning, match="a second time"):
            f8sub.load_float8(model, tmp_path)
    else:
        f8sub.load_float8(model, tmp_path)
    assert not any(isinstance(p, PrimaryWeight) for p in module.parameters())
    expected = values_of(tensors, "model.layers.0.mlp.experts.2.down_proj.weight")
    assert torch.equal(module.down_proj[2].detach().clone(), expected.bfloat16())
