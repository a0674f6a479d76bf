"""TransformerEngine's layers in place of a model's, with the model's weights: one layer, or the blocks of a Llama.

Weights are cast in every forward pass, as no ``is_first_microbatch`` is given, and under FSDP2 in the backward pass
again. Recipes have TransformerEngine's own defaults. Written for its version 2.20.2.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb

RECIPES = {"current scaling": "Float8CurrentScaling", "delayed scaling": "DelayedScaling"}
"""Classes of ``transformer_engine.common.recipe``."""

PASSES_BEFORE_SCALES = {"current scaling": 0, "delayed scaling": 3}
"""Until every operand has a scale of its own size.

Scales begin as 1, with which a loss's gradients round to zero: each pass finds amaxes one more layer down a block.
"""


def engine() -> Any:
    """``transformer_engine.pytorch``, which need not be installed."""
    return importlib.import_module("transformer_engine.pytorch")


def why_not(device: torch.device) -> str | None:
    """Why nothing of it runs on ``device``; None where it does."""
    try:
        engine()
    except (ImportError, OSError) as error:
        return f"TransformerEngine cannot be imported: {error}"
    return None if device.type == "cuda" else "TransformerEngine needs a CUDA device"


def attend(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    """Rotary embedding and causal attention, as transformers' blocks have them.

    Args:
        qkv: (1, tokens, (queries + 2 * keys) * size of a head), the heads of q before those of k and of v.
        cos: (1, tokens, size of a head).
        sin: of the same shape.
        queries: number of q's heads.
        keys: number of k's heads, and of v's.

    Returns:
        (1, tokens, queries * size of a head).
    """
    heads = qkv.unflatten(-1, (queries + 2 * keys, -1)).transpose(1, 2)
    q, k, v = heads.split((queries, keys, keys), dim=1)
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """A Llama's block: RMSNorm with q, k and v as one product, and RMSNorm with SwiGLU's feed-forward, fused.

    ``attend`` is the function of that name, or it compiled. Residuals are added eagerly.
    """

    def __init__(self, block: LlamaDecoderLayer, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        attention, mlp, eps = block.self_attn, block.mlp, block.input_layernorm.variance_epsilon
        q, k, v = (part.weight for part in (attention.q_proj, attention.k_proj, attention.v_proj))
        self.heads = tuple(len(weight) // attention.head_dim for weight in (q, k))
        self._attend = attend
        hidden, inner = mlp.down_proj.weight.shape
        options = {**options_of(q), "eps": eps, "normalization": "RMSNorm"}
        self.qkv = engine().LayerNormLinear(hidden, len(q) + len(k) + len(v), **options)
        self.o_proj = linear(attention.o_proj)
        self.mlp = engine().LayerNormMLP(hidden, inner, activation="swiglu", **options)
        fill(self.qkv.layer_norm_weight, block.input_layernorm.weight)
        fill(self.qkv.weight, q, k, v)
        fill(self.mlp.layer_norm_weight, block.post_attention_layernorm.weight)
        fill(self.mlp.fc1_weight, mlp.gate_proj.weight, mlp.up_proj.weight)
        fill(self.mlp.fc2_weight, mlp.down_proj.weight)

    def forward(
        self, hidden: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Hidden states (1, tokens, hidden) to hidden states, with cosines and sines."""
        attended = self._attend(self.qkv(hidden), *position_embeddings, *self.heads)
        hidden = hidden + self.o_proj(attended)
        return hidden + self.mlp(hidden)


def options_of(weight: torch.Tensor) -> dict[str, Any]:
    """Of a layer that has the weight's dtype and device, and no bias."""
    return {"bias": False, "params_dtype": weight.dtype, "device": weight.device}


def linear(layer: nn.Linear) -> nn.Module:
    """The same layer, without a bias."""
    made: nn.Module = engine().Linear(layer.in_features, layer.out_features, **options_of(layer.weight))
    fill(made.weight, layer.weight)
    return made


def fill(parameter: Any, *weights: torch.Tensor) -> None:
    """Copy weights to a parameter, one below the other."""
    with torch.no_grad():
        parameter.copy_(torch.cat(weights))


def convert(model: nn.Module, recipe: str, attend: Callable[..., torch.Tensor]) -> nn.Module:
    """The one layer of an ``nn.Sequential``, or a Llama's ``blocks``, in place; a forward pass is of the recipe.

    Delayed scaling begins without histories: those of models that are gone would be updated in every pass.
    """
    scaled = model
    if isinstance(model, nn.Sequential):
        scaled = model[0] = linear(model[0])
    else:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = Block(block, attend)
    if recipe == "delayed scaling":
        importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager.reset()
    chosen = getattr(importlib.import_module("transformer_engine.common.recipe"), RECIPES[recipe])()
    forward = scaled.forward

    @functools.wraps(forward)
    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        # One for the whole pass, at whose end histories roll.
        with engine().autocast(enabled=True, recipe=chosen):
            return forward(*args, **kwargs)

    scaled.forward = under_autocast
    return model
