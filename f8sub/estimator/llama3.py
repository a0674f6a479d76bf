"""Llama 3's weights on the meta device, by size: shapes to estimate by, without a forward."""

import torch
from torch import nn

SIZES = {
    "llama3-8b": (32, 4096, 14336, 1024),
    "llama3-70b": (80, 8192, 28672, 1024),
    "llama3-405b": (126, 16384, 53248, 1024),
}
"""Blocks; features of hidden states, of the feed-forward, of keys and of values."""

VOCABULARY = 128256


class Llama3(nn.Module):
    """Embeddings, blocks with transformers' names, and the output head."""

    def __init__(self, blocks: int, hidden: int, forward: int, keys: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(_block(hidden, forward, keys) for _ in range(blocks))
        self.norm = nn.RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, VOCABULARY, bias=False)


def _block(hidden: int, forward: int, keys: int) -> nn.ModuleDict:
    def linear(features: int, of: int) -> nn.Linear:
        return nn.Linear(of, features, bias=False)

    attention = {"q_proj": linear(hidden, hidden), "k_proj": linear(keys, hidden)}
    attention |= {"v_proj": linear(keys, hidden), "o_proj": linear(hidden, hidden)}
    mlp = {"gate_proj": linear(forward, hidden), "up_proj": linear(forward, hidden)}
    mlp |= {"down_proj": linear(hidden, forward)}
    norms = {"input_layernorm": nn.RMSNorm(hidden), "post_attention_layernorm": nn.RMSNorm(hidden)}
    return nn.ModuleDict({"self_attn": nn.ModuleDict(attention), "mlp": nn.ModuleDict(mlp), **norms})


def llama3(name: str) -> Llama3:
    """The model of one of ``SIZES``."""
    with torch.device("meta"):
        return Llama3(*SIZES[name])
