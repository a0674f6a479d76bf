"""transformers' Llama or Qwen3-MoE: converted to float8, sharded by FSDP2, its weights drawn after sharding."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

import f8sub
from f8sub.integrations.transformers import attend_causally
from f8sub_pretrain.settings import Settings

SIZES: dict[str, dict[str, Any]] = {
    "debug": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "10m": {
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    },
    "60m": {
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    },
    "120m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
    },
    "120m-128": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "8b-16": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "moe-debug": {
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "moe-120m": {
        "hidden_size": 512,
        "moe_intermediate_size": 384,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "moe-1b": {
        "hidden_size": 1024,
        "moe_intermediate_size": 384,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "moe-30b-4": {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
}
"""Dimensions of Llamas, and of Qwen3-MoEs where the name says so. Of moe-1b a token uses a quarter of the weights.

120m-128 has heads of 128 channels instead of 64: float8 attention's backward takes no others. 8b-16 has half of Llama 3
8B's layers, for GPUs with 80 GB. moe-30b-4 has 4 of the 48 layers of Qwen3-30B-A3B: 2.5 billion weights.
"""


_ANY_VOCABULARY = 256
"""Token ids of a model of which only the blocks matter."""


def architecture(size: str, vocab_size: int, seq_len: int) -> tuple[PretrainedConfig, type[Any]]:
    """Give the config of a size and the class of its model.

    A router that sends every token to the same experts costs more: Qwen3-MoE adds such a loss, see ``Trainer.loss``.
    """
    shared = {
        **SIZES[size],
        "vocab_size": -(-vocab_size // 16) * 16,
        "max_position_embeddings": seq_len,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }
    if "num_experts" in shared:
        kind = Qwen3MoeForCausalLM
        return Qwen3MoeConfig(**shared, output_router_logits=True, architectures=[kind.__name__]), kind
    return LlamaConfig(**shared, architectures=[LlamaForCausalLM.__name__]), LlamaForCausalLM


def convert(model: nn.Module, settings: Settings) -> None:
    """Convert a model to float8, in place, as the settings say."""
    layer_recipes = settings.float8.layer_recipes
    f8sub.convert_to_float8(
        model,
        recipe={**layer_recipes, "*": settings.float8_recipe} if layer_recipes else settings.float8_recipe,
        skip=settings.float8.skip,
        skip_defaults=settings.float8.skip_defaults,
        float8_all_gather=settings.float8.all_gather,
        backend=settings.float8.backend,
        experts=settings.float8.experts,
        tokens=settings.training.local_batch_size * settings.training.seq_len,
    )
    if settings.float8.keep_swiglu_input == "float8":
        f8sub.keep_swiglu_input_in_float8(model)
    if settings.float8.attention != "high_precision":
        f8sub.attend_in_float8(model, backward="float8" if settings.float8.attention == "float8" else "bf16")


def has_experts_in_float8(settings: Settings) -> bool:
    """Say whether the model of these settings is a mixture whose experts are converted on this machine."""
    if "num_experts" not in SIZES[settings.model.size]:
        return False
    config, kind = architecture(settings.model.size, _ANY_VOCABULARY, settings.training.seq_len)
    with torch.device("meta"):
        model = kind(config)
    with warnings.catch_warnings():
        # What the run itself said when it converted the model.
        warnings.simplefilter("ignore", f8sub.Float8Warning)
        convert(model, settings)
    return any(other.converted for other in f8sub.conversion_report(model).others)


def build_model(settings: Settings, vocab_size: int, mesh: DeviceMesh) -> tuple[Any, str]:
    """Make the model, convert it, shard it and draw its weights.

    The weights depend on the seed and the model alone: not on the number of ranks, float8, torch.compile or
    activation checkpointing.

    Args:
        settings: Size, precision, float8, compile, activation checkpointing and seed.
        vocab_size: Number of token ids.
        mesh: The ranks to shard over.

    Returns:
        The sharded model, which is both an FSDPModule and transformers' model; and a line about what float8
        covers, one about how fast a mixture's experts are in it, and how gradients are reduced.
    """
    config, kind = architecture(settings.model.size, vocab_size, settings.training.seq_len)
    with torch.device("meta"):
        model = kind(config)
    attend_causally(model)
    report = "float8: off"
    if settings.float8_recipe:
        convert(model, settings)
        found = f8sub.conversion_report(model)
        report = "\n".join([f"float8: {found.summary}", *found.experts])

    layers = model.model.layers
    for index, block in enumerate(layers):
        if settings.activation_checkpoint.mode == "full":
            block = checkpoint_wrapper(block)
        elif settings.activation_checkpoint.mode == "selective":
            block = checkpoint_wrapper(block, context_fn=f8sub.checkpoint_policy())
        if settings.compile.enabled:
            # torch 2.11 cannot trace the hooks by which transformers records what routers say; they run eagerly there.
            block = torch.compile(block, fullgraph=kind is not Qwen3MoeForCausalLM)
        layers[index] = block

    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, settings.training.dtype),
        reduce_dtype=getattr(torch, settings.training.reduce_dtype),
    )
    reshard = settings.training.reshard_after_forward
    for block in layers:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # By default FSDP2 gathers a block when its own forward begins, where f8sub cannot gather it where it is read.
    for block, following in itertools.pairwise(layers):
        block.set_modules_to_forward_prefetch([following])
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if settings.float8.gradients:
        every = settings.float8.monitor_every if settings.float8_recipe else 0
        reduction = f8sub.reduce_gradients_in_float8(model, measure=every > 0, measure_every=max(1, every))
        report = f"{report}; {reduction}"

    model.to_empty(device=mesh.device_type)
    draw_weights(model, kind, config, settings.training.seed)
    return model, report


@torch.no_grad()
def draw_weights(model: nn.Module, kind: type[Any], config: PretrainedConfig, seed: int) -> None:
    """Fill a sharded model with the initial weights that transformers gives an unsharded one.

    One layer at a time is drawn in full on every rank, from the same seed, and each rank keeps its shard.

    Args:
        model: The sharded model, its memory allocated.
        kind: Its class before it was sharded.
        config: What the model was made from.
        seed: Seed of the draw; torch's global generators are left seeded with it.
    """
    torch.manual_seed(seed)
    with torch.device("meta"):
        unsharded: Any = kind(config)
    targets = {
        name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): tensor
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    for prefix, layer in unsharded.named_modules():
        own = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
        names = [name for name, _ in own]
        if not names:
            continue
        device = targets[f"{prefix}.{names[0]}"].device
        layer.to_empty(device=device, recurse=False)
        unsharded._init_weights(layer)
        for name in names:
            target, full = targets[f"{prefix}.{name}"], getattr(layer, name)
            if isinstance(target, DTensor):
                full = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
            target.copy_(full)
        layer.to_empty(device="meta", recurse=False)
