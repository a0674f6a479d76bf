from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import Module, ModuleDict

HEADS = 4


class Llama3Block(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        wqkv: Linear.Config
        wo: Linear.Config
        feed_forward: FeedForward.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wqkv, self.wo = config.wqkv.build(), config.wo.build()
        self.feed_forward = config.feed_forward.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.wqkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.wo(attended)
        return x + self.feed_forward(F.rms_norm(x, x.shape[-1:]))


class Llama3Model(BaseModel):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        dim: int
        vocab_size: int
        max_context_length: int
        layers: list[Llama3Block.Config]
        lm_head: Linear.Config
        local_compile_regions: list[str] = field(default_factory=list)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            return sum(p.numel() for p in model.parameters()), 0

    hooks_registered = 0
    """How often the model's own hooks were."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = ModuleDict({str(i): layer.build() for i, layer in enumerate(config.layers)})
        self.lm_head = config.lm_head.build()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(F.rms_norm(x, x.shape[-1:]))

    def _apply_fsdp(self, *, parallelism_context: Any, training: Any, parallelism: Any) -> None:
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, training.mixed_precision_param),
            reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        )
        for layer in self.layers.values():
            fully_shard(layer, mesh=parallelism_context.mesh, mp_policy=policy)
        fully_shard(self, mesh=parallelism_context.mesh, mp_policy=policy)

    @classmethod
    def _register_optimizer_hooks(cls, optimizers: Any, model_parts: Any, parallelism_context: Any) -> None:
        Llama3Model.hooks_registered += 1
