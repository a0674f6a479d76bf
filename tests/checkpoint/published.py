"""Checkpoints in the forms in which float8 models are published, tiny, written by torch's operators alone.

Sources: the ``config.json`` and the index of each repository that ``FORMS`` names.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.checkpoint.files import BLOCK, block_scales, spread
from tests.data_sets import gaussian, generator

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
WIDE = 2 * BLOCK

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": WIDE,
    "intermediate_size": WIDE,
    "moe_intermediate_size": BLOCK,
    "shared_expert_intermediate_size": BLOCK,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": BLOCK,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LATENT: dict[str, Any] = {
    **{name: value for name, value in SIZES.items() if name not in ("head_dim", "num_local_experts")},
    "num_key_value_heads": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": BLOCK,
    "kv_lora_rank": BLOCK,
    "qk_rope_head_dim": BLOCK,
    "qk_nope_head_dim": BLOCK,
    "v_head_dim": BLOCK,
}
SPARSE = {**LATENT, "index_n_heads": 2, "index_head_dim": BLOCK, "index_topk": 8}
"""Latent attention, and the indexer of sparse attention before it."""

FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
"""DeepSeek's own words."""


def _compressed(weights: dict[str, Any], inputs: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {**FLOAT8, "dynamic": False, **weights},
        "input_activations": {**FLOAT8, **inputs},
        "output_activations": None,
        "format": "float-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ignored,
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
    }


_DYNAMIC = {"strategy": "token", "dynamic": True}
_CHANNEL = {"strategy": "channel"}
_TENSOR = {"strategy": "tensor"}
_BLOCKS = {"strategy": "block", "block_structure": [BLOCK, BLOCK]}
_ROUTERS = ["lm_head", "re:.*mlp.gate$"]

MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


class Form(NamedTuple):
    """One published form.

    Attributes:
        kind: transformers' type of the model.
        sizes: of its configuration.
        quantization: the ``quantization_config``.
        recipe: whose weights have the file's blocks.
        scales: dtype of the scales.
        beside: names of static scales of activations, with what stands before them: a layer or its parent.
        ignored: names of tensors that the model's class leaves out.
        in_float8: regular expression of the layers that are in float8.
    """

    kind: str
    sizes: dict[str, Any]
    quantization: dict[str, Any]
    recipe: str = "blockwise"
    scales: torch.dtype = torch.float32
    beside: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    in_float8: str = r"_proj$|_proj_with_mqa$|indexer\.w(q_b|k)$|in_proj_qkvz$"


def prediction(layer: int) -> tuple[str, ...]:
    """Names in a layer of multi-token prediction, as DeepSeek and GLM have it."""
    leaves = ("eh_proj", "enorm", "shared_head.head", "mlp.experts.0.up_proj")
    return tuple(f"model.layers.{layer}.{leaf}.weight" for leaf in leaves)


FORMS = {
    "DeepSeek-V3": Form("deepseek_v3", LATENT, FP8, ignored=prediction(61)),
    "DeepSeek-V3.2": Form("deepseek_v32", SPARSE, {**FP8, "scale_fmt": "ue8m0"}, ignored=prediction(61)),
    "GLM-4.5-FP8": Form(
        "glm4_moe",
        {**SIZES, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
        _compressed(_CHANNEL, _DYNAMIC, _ROUTERS),
        "rowwise",
        ignored=prediction(46),
    ),
    "GLM-5-FP8": Form("glm_moe_dsa", SPARSE, FP8, ignored=prediction(78)),
    "Qwen3-Next-80B-A3B-FP8": Form(
        "qwen3_next",
        {
            **SIZES,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": BLOCK,
            "linear_value_head_dim": BLOCK,
        },
        FP8,
        scales=BF16,
        ignored=("mtp.fc.weight", "mtp.layers.0.mlp.gate.weight", "mtp.norm.weight"),
    ),
    "Qwen3-30B-A3B-FP8": Form("qwen3_moe", SIZES, FP8, scales=BF16),
    "Qwen3-30B-A3B-FP8-dynamic": Form(
        "qwen3_moe", SIZES, _compressed(_CHANNEL, _DYNAMIC, _ROUTERS), "rowwise", scales=BF16
    ),
    "Qwen3-30B-A3B-FP8-block": Form(
        "qwen3_moe",
        SIZES,
        _compressed(_BLOCKS, {"strategy": "group", "group_size": BLOCK, "dynamic": True}, _ROUTERS),
        scales=BF16,
    ),
    "gpt-oss-20b": Form("gpt_oss", SIZES, MXFP4, "rowwise"),
    "Llama-3.1-8B-FP8-KV": Form(
        "llama",
        SIZES,
        _compressed(_TENSOR, {**_TENSOR, "dynamic": False}, ["lm_head"]),
        "tensorwise",
        scales=BF16,
        beside=("q_proj.input_scale", "k_proj.output_scale", "self_attn.k_scale", "self_attn.v_scale"),
    ),
    "Ministral-3-8B": Form(
        "mistral",
        SIZES,
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        "tensorwise",
        beside=("q_proj.activation_scale", "down_proj.activation_scale"),
    ),
    "MiniMax-M2": Form("minimax_m2", SIZES, FP8, in_float8=r"_proj$|\.w[123]$"),
}
"""By the name of a repository."""

UNREAD = {
    "Qwen3-30B-A3B-FP8-block": FORMS["Qwen3-30B-A3B-FP8-block"],
    "DeepSeek-V3 with 64 more rows": Form("deepseek_v3", {**LATENT, "qk_rope_head_dim": 64}, FP8),
    "Llama-3.1-405B-FP8": Form(
        "llama",
        SIZES,
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        "rowwise",
        beside=("q_proj.input_scale_ub",),
    ),
    "Llama-3.1-8B-Instruct-FP8": Form(
        "llama",
        SIZES,
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        "tensorwise",
        beside=(
            "q_proj.input_scale",
            "k_proj.k_scale",
            "v_proj.v_scale",
            "self_attn.kv_scale",
            "self_attn.prob_scale",
        ),
    ),
}
"""Forms that transformers does not read on a CPU, or not as they are meant: their values in float64 are the oracle."""


def model_of(form: Form) -> nn.Module:
    config = AutoConfig.for_model(form.kind, **form.sizes)
    return AutoModelForCausalLM.from_config(config, dtype=BF16, attn_implementation="eager")


def written(form: Form, folder: Path) -> tuple[Path, dict[str, torch.Tensor], set[str]]:
    """Write a checkpoint of random values; its folder, the values of its codes, and the names in a plain one."""
    model, rng = model_of(form), generator(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(0.05 * gaussian(tuple(parameter.shape), rng))
    model.save_pretrained(folder / "plain")
    plain = load_file(folder / "plain" / "model.safetensors")
    more = {name: 0.05 * gaussian((BLOCK, WIDE), rng).to(BF16) for name in form.ignored}
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, w in {**plain, **more}.items():
        of_name, value = _published(form, name, w)
        tensors |= of_name
        if value is not None and name in plain:
            values[name] = value
    where = folder / "published"
    where.mkdir()
    # Scales may be in another file than their codes.
    names = sorted(tensors)
    files = {name: f"model-{1 + index % 2:05}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file(
            {name: tensors[name] for name in names if files[name] == file}, where / file, {"format": "pt"}
        )
    index = {"metadata": {}, "weight_map": files}
    (where / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "plain" / "config.json").read_text())
    (where / "config.json").write_text(json.dumps({**config, "quantization_config": form.quantization}))
    return where, values, set(plain)


def _published(form: Form, name: str, w: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """The tensors of one of a plain checkpoint, and the values of its codes in float64; None where it has none."""
    layer = name.removesuffix(".weight")
    if form.quantization is MXFP4:
        if not name.endswith(("gate_up_proj", "down_proj")):
            return {name: w}, None
        experts, rows, columns = w.shape
        codes = torch.arange(experts * columns * rows // 2, dtype=torch.int64) * 7 % 251
        blocks = codes.to(torch.uint8).view(experts, columns, rows // 32, 16)
        scales = torch.full(blocks.shape[:-1], 120, dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}, None
    if layer == name or not re.search(form.in_float8, layer):
        return {name: w}, None
    scale, each = _scales(form, w.float())
    codes = (w.float() / each).clamp(-448, 448).to(E4M3)
    leaf = "_scale_inv" if form.quantization["quant_method"] == "fp8" else "_scale"
    made = {name: codes, f"{name}{leaf}": scale}
    for static in form.beside:
        of, _, kind = static.partition(".")
        if f".{of}." in f".{layer}.":
            made[f"{layer.partition(of)[0]}{of}.{kind}"] = torch.tensor([0.25], dtype=form.scales)
    return made, codes.double() * each.double()


def _scales(form: Form, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales as they are stored, and that of each element in float32."""
    described = form.quantization.get("config_groups", {}).get("group_0", {}).get("weights", {})
    strategy = described.get("strategy", "block" if form.quantization.get("weight_block_size") else "tensor")
    if strategy == "block":
        scale = block_scales(w, form.quantization.get("scale_fmt") == "ue8m0").to(form.scales)
        return scale, spread(scale.float(), w.shape)
    if form.quantization["quant_method"] == "fbgemm_fp8" or strategy == "channel":
        scale = (w.abs().amax(1, keepdim=True) / 448).to(form.scales)
        return scale, scale.float()
    scale = (w.abs().amax() / 448).to(form.scales)
    return scale.view(1) if described else scale, scale.float()


def read_by_transformers(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model as transformers itself reads the file and dequantizes it; and what it says of names."""
    config = json.loads((folder / "config.json").read_text())
    how = {
        "mxfp4": transformers.Mxfp4Config,
        "compressed-tensors": transformers.CompressedTensorsConfig,
        "fp8": transformers.FineGrainedFP8Config,
    }.get(config.get("quantization_config", {}).get("quant_method"))
    more = {} if how is None else {"quantization_config": how(dequantize=True)}
    model, told = AutoModelForCausalLM.from_pretrained(
        folder, dtype=BF16, output_loading_info=True, attn_implementation="eager", **more
    )
    return model, told
