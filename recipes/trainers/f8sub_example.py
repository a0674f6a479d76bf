"""What the scripts beside this train: put your model and your data here."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

BLOCK = "LlamaDecoderLayer"
"""Class of the blocks that FSDP2 shards one by one."""
VOCABULARY, LENGTH = 256, 32


def build_model() -> LlamaForCausalLM:
    """A Llama of 0.3 million parameters, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count in steps of their own, which a model can learn."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start, step = index * 7919 % VOCABULARY, 1 + index % 5
        tokens = (start + step * torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}
