"""Names that the file or the model has alone are told, all of them, and what is there is read."""

import re
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import f8sub
from tests.checkpoint.test_frozen_experts import (
    frozen,
    plain,
    values_of,
    written,
)
from tests.experts.models import DEEPSEEK, SMALL, experts_of

EXPERTS = "model.layers.0.mlp.experts"
GONE = f"{EXPERTS}.1.down_proj.weight"


def without(folder, *names: str) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({k: v for k, v in tensors.items() if k not in names}, file, metadata={"format": "pt"})


def with_more(folder, *names: str) -> None:
    file = folder / "model.safetensors"
    more = {name: torch.ones(3) for name in names}
    save_file({**load_file(file), **more}, file, metadata={"format": "pt"})


def told_by(call) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [
        str(w.message) for w in found if "the checkpoint" in str(w.message) and "is loaded" in str(w.message)
    ]


@pytest.mark.parametrize("primary", [False, True])
def test_experts_that_are_there_are_read_where_one_is_missing(tmp_path, primary):
    tensors, model = written(tmp_path, power_of_2=True), frozen(primary_weights=primary)
    (module,) = experts_of(model)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.ones_like(weight))
    before = module.down_proj[1].detach().clone()
    without(tmp_path, GONE, f"{GONE}_scale_inv")
    (told,) = told_by(lambda: f8sub.load_float8(model, tmp_path, strict=False))
    assert told == f"the checkpoint lacks {GONE}, which keeps the values that it had; the rest is loaded"
    for expert in (0, 2):
        expected = values_of(tensors, f"{EXPERTS}.{expert}.down_proj.weight").bfloat16()
        assert torch.equal(module.down_proj[expert].detach().clone(), expected), expert
    assert torch.equal(module.down_proj[1].detach().clone(), before)
    f8sub.precompute_scales(model)
    operand = module._f8sub.rowwise(module, "down_proj", torch.bfloat16).of_group(2)
    values = operand.data.float() * operand.scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(values.bfloat16(), values_of(tensors, f"{EXPERTS}.2.down_proj.weight").bfloat16())


def test_every_name_is_told(tmp_path):
    written(tmp_path)
    model = frozen()
    gone = [f"{EXPERTS}.{index}.{leaf}.weight" for index in range(3) for leaf in ("gate_proj", "up_proj")]
    gone += ["model.norm.weight"]
    without(tmp_path, *gone, *(f"{name}_scale_inv" for name in gone))
    more = [f"other.{index}.weight" for index in range(5)]
    with_more(tmp_path, *more)
    (told,) = told_by(lambda: f8sub.load_float8(model, tmp_path, strict=False))
    lacks, has = re.fullmatch(
        "the checkpoint lacks (.*), which keep the values that they had and has (.*), which the model has not; "
        "the rest is loaded",
        told,
    ).groups()
    assert sorted(lacks.split(", ")) == sorted(gone)
    assert has.split(", ") == more
    with pytest.raises(
        f8sub.Float8ConfigError, match=r"lacks model.* and 4 more and has other\.0\.weight, .* and 2"
    ):
        f8sub.load_float8(model, tmp_path)


def test_experts_on_meta_of_which_a_part_is_missing_are_refused(tmp_path):
    written(tmp_path)
    without(tmp_path, GONE, f"{GONE}_scale_inv")
    with torch.device("meta"):
        model = f8sub.convert_to_float8(plain(), "blockwise", experts=True)
    with pytest.raises(
        f8sub.Float8ConfigError, match=rf"experts\.down_proj: it is on meta, .* lacks {GONE}, "
    ):
        f8sub.load_float8(model, tmp_path, strict=False, device="cpu")
    assert all(parameter.is_meta for parameter in model.parameters())


MTP = {
    "deepseek_v3": (DEEPSEEK, "model.layers.61.eh_proj.weight"),
    "glm4_moe": (
        {**SMALL, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
        "model.layers.46.eh_proj.weight",
    ),
    "qwen3_next": (
        {
            **SMALL,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        "mtp.fc.weight",
    ),
}


@pytest.mark.parametrize("kind", MTP)
def test_what_a_models_class_ignores_is_no_difference(kind, tmp_path):
    """Published forms hold a layer of multi-token prediction, which transformers' classes leave out."""
    sizes, name = MTP[kind]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=torch.bfloat16)
    f8sub.convert_to_float8(model, "rowwise", min_dim=0, experts=True)
    f8sub.save_float8(model, tmp_path / "out", dtype=torch.bfloat16)
    with_more(tmp_path / "out", name)
    assert not told_by(lambda: f8sub.load_float8(model, tmp_path / "out"))
    with_more(tmp_path / "out", "another.weight")
    with pytest.raises(f8sub.Float8ConfigError, match=r"has another\.weight, which"):
        f8sub.load_float8(model, tmp_path / "out")
    without(tmp_path / "out", "another.weight", "model.norm.weight")
    model._keys_to_ignore_on_load_missing = {r"^model\.norm"}
    assert not told_by(lambda: f8sub.load_float8(model, tmp_path / "out"))
    model._keys_to_ignore_on_load_missing = None
    with pytest.raises(f8sub.Float8ConfigError, match=r"lacks model\.norm\.weight"):
        f8sub.load_float8(model, tmp_path / "out")


def test_frequencies_and_positions_that_old_files_hold_are_no_difference(tmp_path):
    written(tmp_path)
    model = frozen()
    with_more(tmp_path, "model.layers.0.self_attn.rotary_emb.inv_freq", "model.embeddings.position_ids")
    with pytest.raises(f8sub.Float8ConfigError, match=r"has model\.embeddings\.position_ids, which"):
        f8sub.load_float8(model, tmp_path)
    model.model.register_buffer("position_ids", torch.arange(4), persistent=False)
    f8sub.load_float8(model, tmp_path)


@pytest.mark.parametrize("leaf", ["input_scale", "activation_scale", "output_scale", "k_scale"])
def test_static_scales_of_activations_are_no_difference(tmp_path, leaf):
    written(tmp_path)
    model = frozen()
    with_more(tmp_path, f"{EXPERTS}.1.down_proj.{leaf}", f"{EXPERTS}.1.{leaf}")
    f8sub.load_float8(model, tmp_path)
    with_more(tmp_path, f"model.norm.{leaf}", f"model.{leaf}")
    with pytest.raises(
        f8sub.Float8ConfigError, match=rf"nothing and has model\.(norm\.)?{leaf}, \S+{leaf}, which"
    ):
        f8sub.load_float8(model, tmp_path)


@pytest.mark.parametrize("layout", ["fp8", "compressed-tensors"])
def test_missing_scales_have_the_name_that_the_file_would_give_them(tmp_path, layout):
    net = torch.nn.Sequential(torch.nn.Linear(256, 128, bias=False))
    f8sub.convert_to_float8(net, "blockwise", min_dim=0)
    f8sub.save_float8(net, tmp_path / "out", layout=layout, dtype=torch.bfloat16)
    leaf = {"fp8": "weight_scale_inv", "compressed-tensors": "weight_scale"}[layout]
    without(tmp_path / "out", f"0.{leaf}")
    with pytest.raises(f8sub.Float8ConfigError, match=rf"no scales of it: 0\.{leaf}$"):
        f8sub.load_float8(net, tmp_path / "out", strict=False)
