"""A Llama whose checkpoints transformers reads, trained a little, and what its forward multiplies."""

from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn

import f8sub
from f8sub.checkpoint.gathered import blocks_of
from f8sub.linear import float8_linear
from tests.models import seed_weights

BF16 = torch.bfloat16


def llama(intermediate: int = 384, **options: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **{"tie_word_embeddings": False, **options},
    )
    return seed_weights(transformers.LlamaForCausalLM(config))


def trained(recipe: Any, steps: int = 2, **options: Any) -> nn.Module:
    """A converted Llama after some steps under bf16 autocast."""
    model = f8sub.convert_to_float8(llama(**options), recipe=recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        with torch.autocast("cpu", BF16):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        f8sub.precompute_scales(model)
    return model


def multiplied(model: nn.Module, dtype: torch.dtype = BF16) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Codes and scales of w that each layer's fprop multiplies in a forward under autocast to ``dtype``."""
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    running: list[str] = []
    multiply = float8_linear.gemm_nt

    def recorded(backend: str, a: Any, b: Any, *args: Any) -> torch.Tensor:
        found[running[-1]] = b.data.clone(), b.scale_inv.clone()
        return multiply(backend, a, b, *args)

    hooks = []
    for _, parts in blocks_of(model):
        for part in parts:
            if part.format is not None:
                enter = lambda *_, fqn=part.fqn: running.append(fqn)  # noqa: E731
                hooks.append(part.module.register_forward_pre_hook(enter))
    tokens = torch.arange(8).view(1, 8)
    with (
        mock.patch.object(float8_linear, "gemm_nt", recorded),
        torch.no_grad(),
        torch.autocast("cpu", dtype),
    ):
        model.eval()(tokens)
    for hook in hooks:
        hook.remove()
    return found
