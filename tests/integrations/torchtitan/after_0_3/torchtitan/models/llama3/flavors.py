from typing import Any

from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import ColumnParallelLinear, FP32OutputLinear, RowParallelLinear
from torchtitan.models.llama3.model import Llama3Block, Llama3Model

SIZES = {"debugmodel": (2, 256, 512), "8B": (32, 4096, 14336), "70B": (80, 8192, 28672)}
"""Layers, width and hidden width."""


def build_model_config(
    flavor: str, *, seq_len: int | None = None, attn_backend: str = "flex", converters: Any = None
) -> Llama3Model.Config:
    layers, dim, hidden = SIZES[flavor]
    blocks = [
        Llama3Block.Config(
            wqkv=ColumnParallelLinear.Config(in_features=dim, out_features=3 * dim),
            wo=RowParallelLinear.Config(in_features=dim, out_features=dim),
            feed_forward=FeedForward.Config(
                w13=ColumnParallelLinear.Config(in_features=dim, out_features=hidden, num_linears=2),
                w2=RowParallelLinear.Config(in_features=hidden, out_features=dim),
            ),
        )
        for _ in range(layers)
    ]
    head = FP32OutputLinear.Config(in_features=dim, out_features=256)
    return Llama3Model.Config(
        dim=dim, vocab_size=256, max_context_length=seq_len or 2048, layers=blocks, lm_head=head
    )
