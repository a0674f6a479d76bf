"""Llama 4 for torchtitan 0.3, which has none: the dimensions of torchtitan 0.2's, of 0.3's own parts.

It has what ``titan_0_3.py`` takes of a model's ``config_registry`` in torchtitan: ``model_registry`` and a config of
each flavor. Blocks are those of Qwen3, without its norms of queries and keys. As in torchtitan 0.2's ``17bx16e`` every
layer has experts, one of which a token has, beside a shared one, and RoPE. Attention in chunks is left out: it is the
same up to the 8192 tokens of a chunk. Scores multiply what experts return, as in all mixtures of torchtitan 0.3, and
not what they are given.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import (
    decoder_vocab_size,
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.deepseek_v3 import (
    _EMBEDDING_INIT,
    _LINEAR_INIT,
    _NORM_INIT,
    _depth_experts_init,
    _depth_init,
    _output_linear_init,
)
from torchtitan.models.qwen3 import config_registry as qwen3
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock


class Dimensions(NamedTuple):
    """Of a flavor. ``hidden`` is the width of an expert, and of the shared one."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    experts: int
    vocabulary: int


FLAVORS = {
    "17bx16e": Dimensions(5120, 48, 40, 8, 8192, 16, 202048),
    "debugmodel": Dimensions(256, 6, 16, 8, 256, 8, 2048),
}
TOP_K = 1


def _norm(dim: int) -> Any:
    return RMSNorm.Config(normalized_shape=dim, param_init=_NORM_INIT)


def _layer(at: int, of: Dimensions, attn_backend: str, moe_comm_backend: str) -> Any:
    head_dim = of.dim // of.heads
    return Qwen3TransformerBlock.Config(
        attention_norm=_norm(of.dim),
        ffn_norm=_norm(of.dim),
        attention=make_gqa_config(
            dim=of.dim,
            n_heads=of.heads,
            n_kv_heads=of.kv_heads,
            head_dim=head_dim,
            wqkv_param_init=_LINEAR_INIT,
            wo_param_init=_depth_init(at),
            inner_attention=get_attention_config(attn_backend),
            fuse_qkv=True,
            rope=ComplexRoPE.Config(
                dim=head_dim,
                max_seq_len=10485760,
                theta=500000,
                scaling="llama",
                scaling_factor=16.0,
                high_freq_factor=1.0,
            ),
        ),
        moe=make_moe_config(
            num_experts=of.experts,
            router=make_router_config(
                dim=of.dim,
                num_experts=of.experts,
                gate_param_init=_depth_init(at),
                top_k=TOP_K,
                score_func="sigmoid",
            ),
            routed_experts=make_routed_experts_config(
                dim=of.dim,
                hidden_dim=of.hidden,
                num_experts=of.experts,
                top_k=TOP_K,
                param_init=_depth_experts_init(at),
                comm_backend=moe_comm_backend,
            ),
            shared_experts=make_ffn_config(
                dim=of.dim,
                hidden_dim=of.hidden,
                w1_param_init=_LINEAR_INIT,
                w2w3_param_init=_depth_init(at),
            ),
        ),
    )


def model_registry(flavor: str, attn_backend: str = "flex", moe_comm_backend: str = "standard") -> Any:
    """Return the ``ModelSpec`` of a flavor, as torchtitan's functions of this name do."""
    of = FLAVORS[flavor]
    model = Qwen3Model.Config(
        vocab_size=of.vocabulary,
        dim=of.dim,
        norm=_norm(of.dim),
        tok_embeddings=Embedding.Config(
            num_embeddings=of.vocabulary, embedding_dim=of.dim, param_init=_EMBEDDING_INIT
        ),
        lm_head=Linear.Config(
            in_features=of.dim, out_features=of.vocabulary, param_init=_output_linear_init(of.dim)
        ),
        layers=[_layer(at, of, attn_backend, moe_comm_backend) for at in range(of.layers)],
    )
    qwen = qwen3.model_registry("debugmodel_moe")
    return dataclasses.replace(qwen, name="llama4", flavor=flavor, model=model, state_dict_adapter=None)


def _config_of(flavor: str) -> Any:
    """Return a trainer's config: that of Qwen3-30B-A3B, for another model."""
    config = qwen3.qwen3_30b_a3b()
    config.model_spec = model_registry(flavor)
    loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))
    config.loss = ChunkedLossWrapper.Config(loss_fn=loss)
    return config


def llama4_17bx16e() -> Any:
    return _config_of("17bx16e")


def llama4_debugmodel() -> Any:
    return _config_of("debugmodel")
