"""Tiny models of transformers, each from its configuration class alone, and a batch for each."""

import dataclasses
import inspect
from typing import Any

import torch

WIDTH, HEADS, CLASSES = 64, 4, 128

SIZES = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), WIDTH
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "intermediate_size_mlp"), 2 * WIDTH),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "block_ff_dim"), 2 * WIDTH),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "depth"), 2),
    "num_hidden_layers": 4,
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("head_dim", "attention_head_dim", "d_kv", "global_head_dim"), WIDTH // HEADS),
    "num_key_value_heads": 2,
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "n_ctx"), CLASSES),
    "vocab_size_per_layer_input": CLASSES,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 16,
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 64),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("first_k_dense_replace", "n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    "linear_conv_kernel_dim": 4,
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(
        ("mamba_d_head", "mamba_head_dim", "mamba_d_state", "mamba_chunk_size", "mamba_dt_rank"), 16
    ),
    **dict.fromkeys(("ssm_state_size", "state_size", "chunk_size", "time_step_rank"), 16),
    **dict.fromkeys(("mamba_n_groups", "mamba_expand", "n_groups"), 2),
    "mamba_d_ssm": 128,
    **dict.fromkeys(("sliding_window", "attention_window_size"), 8),
    "attention_chunk_size": 16,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 16,
    **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
    "lru_width": WIDTH,
    "pad_token_id": 0,
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    "eos_token_id": 2,
}
"""Arguments of configurations, where their class takes them and their default is a number."""

MLA = {"head_dim": None, "num_key_value_heads": HEADS}
OTHER = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "mistral4"), MLA
    ),
    **dict.fromkeys(("sarvam_mla", "youtu"), MLA),
    # One layer of full attention, where the type's own pattern has it after more layers.
    **dict.fromkeys(
        ("bailing_hybrid", "kimi_linear"), MLA | {"layer_types": ["linear_attention", "full_attention"] * 2}
    ),
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"mamba_dt_rank": 16},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "layers_block_type": ["mamba", "attention"] * 2,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "codegen": {"rotary_dim": 8},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
}
"""Of model types whose sizes depend on each other; None leaves an argument out."""

FEW = ("albert", "bert", "bart", "llama4_text", "mamba", "mixtral", "inkling_text", "jetmoe", "vit")

MANY = (
    *(
        "afmoe",
        "albert",
        "apertus",
        "arcee",
        "aria_text",
        "bamba",
        "bart",
        "beit",
        "bert",
        "bigbird_pegasus",
        "bitnet",
    ),
    *(
        "bloom",
        "codegen",
        "cohere2",
        "ctrl",
        "deepseek_v2",
        "deepseek_v3",
        "deberta",
        "diffllama",
        "distilbert",
    ),
    *(
        "dots1",
        "electra",
        "ernie4_5_moe",
        "exaone4",
        "falcon",
        "falcon_h1",
        "falcon_mamba",
        "flex_olmo",
        "gemma3_text",
    ),
    *(
        "gemma3n_text",
        "glm4_moe",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox",
        "gpt_oss",
        "granitemoehybrid",
    ),
    *(
        "hunyuan_v1_moe",
        "inkling_text",
        "jamba",
        "jetmoe",
        "lfm2_moe",
        "llama",
        "llama4_text",
        "mamba",
        "mamba2",
    ),
    *(
        "minimax",
        "mixtral",
        "modernbert",
        "mpt",
        "nemotron_h",
        "nllb-moe",
        "olmoe",
        "phi3",
        "phimoe",
        "qwen3_5_text",
    ),
    *("qwen3_moe", "recurrent_gemma", "rwkv", "t5", "vit"),
    # New in transformers 5.6 to 5.24.
    *(
        "axk2",
        "bailing_hybrid",
        "beam",
        "deepseek_v4",
        "dory",
        "flint",
        "gemma4_text",
        "granite_swa",
        "hy_v4",
    ),
    *("kimi_linear", "kolibri1", "lara_mini", "lfm3", "minimax_m3_vl_text", "neomme", "qwen4_exp_text"),
    *("sarvam_mla", "sarvam_moe", "ultrabert", "zaya"),
)
"""81 model types: dense ones, mixtures, state spaces, hybrids, encoders, images."""


def names_of(cls: type) -> dict[str, Any]:
    """The arguments of a configuration's class and their defaults."""
    if dataclasses.is_dataclass(cls):
        found = {field.name: field.default for field in dataclasses.fields(cls)}
    else:
        found = {name: p.default for name, p in inspect.signature(cls.__init__).parameters.items()}
    return found | {name: None for name in getattr(cls, "attribute_map", {}) if name not in found}


def small(cls: Any, **others: Any) -> Any:
    """A configuration of that class with all sizes small."""
    names, aliases = names_of(cls), getattr(cls, "attribute_map", {})
    given = {
        name: size
        for name, size in SIZES.items()
        if name in names
        and not isinstance(names[name], list | tuple | str | dict)
        and aliases.get(name) not in SIZES
    }
    return cls(**{name: value for name, value in (given | others).items() if value is not None})


def build(kind: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model of that type in evaluation, with seeded weights, and what it takes."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    mappings = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    )
    name = next(mapping[kind] for mapping in mappings if kind in mapping)
    cls = getattr(transformers, name if isinstance(name, str) else name[0])
    torch.manual_seed(0)
    model = cls(small(transformers.CONFIG_MAPPING[kind], **OTHER.get(kind, {}))).eval()
    if model.main_input_name == "pixel_values":
        return model, {"pixel_values": torch.randn(2, 3, 32, 32)}
    ids = torch.randint(3, 100, (2, 24))
    batch = {"input_ids": ids}
    return model, batch | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
