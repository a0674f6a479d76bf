"""Blocks of a Llama 3 8B with embeddings, head and loss, as one variant runs them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from f8sub.weights.weight import local_tensor
from scripts.bench.gpu import transformer_engine_layers
from scripts.bench.gpu.checkpoints import checkpointed
from scripts.bench.gpu.variants import Variant

DIMENSIONS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
SIZES = {
    "8b": dict(zip(DIMENSIONS, (4096, 14336, 32, 8, 128256), strict=True)),
    "tiny": dict(zip(DIMENSIONS, (64, 128, 4, 2, 512), strict=True)),
}
LEARNING_RATE = 1e-4


class Slice(nn.Module):
    """The blocks and the last norm, by hidden states; or all of a causal language model, by tokens and targets."""

    def __init__(self, config: LlamaConfig, *, liger: bool) -> None:
        super().__init__()
        with ligers_modules() if liger else contextlib.nullcontext():
            whole = LlamaForCausalLM(config)
        self.embedding, self.blocks = whole.model.embed_tokens, whole.model.layers
        self.norm, self.lm_head = whole.model.norm, whole.lm_head
        self.rotary = whole.model.rotary_emb

    def forward(self, given: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor], whole: bool) -> Any:
        """Hidden states (1, tokens, hidden) to hidden states; or tokens (1, tokens) to logits."""
        hidden = self.embedding(given) if whole else given
        for block in self.blocks:
            hidden = block(hidden, position_embeddings=positions)
        hidden = self.norm(hidden)
        return self.lm_head(hidden) if whole else hidden


@contextlib.contextmanager
def ligers_modules() -> Iterator[None]:
    """Llamas made meanwhile have Liger-Kernel's norms and feed-forwards."""
    from liger_kernel.transformers import LigerRMSNorm, LigerSwiGLUMLP

    replaced = {"LlamaRMSNorm": LigerRMSNorm, "LlamaMLP": LigerSwiGLUMLP}
    with mock.patch.multiple(modeling_llama, **replaced):
        yield


@dataclass(frozen=True)
class Batch:
    """One of the sets that take turns."""

    hidden: torch.Tensor  # (1, tokens, hidden), bfloat16; requires its gradient
    cotangent: torch.Tensor  # of the same shape
    tokens: torch.Tensor  # (1, tokens), int64
    targets: torch.Tensor  # (tokens,), int64

    @classmethod
    def random(cls, size: str, tokens: int, device: torch.device) -> Batch:
        """Gaussian hidden states and cotangents, uniform tokens."""
        shape = (1, tokens, SIZES[size]["hidden_size"])
        hidden, cotangent = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
        ids = torch.randint(SIZES[size]["vocab_size"], (2, tokens), device=device)
        return cls(hidden.requires_grad_(), cotangent, ids[:1], ids[1])


class Trainer:
    """A variant's model and optimizer: float32 weights, gathered for bfloat16 as torchtitan does, AdamW fused.

    Of a graphed variant bfloat16 weights that are not sharded: under FSDP2 ``precompute_scales`` has work to do after
    each step, findings that the host reads for one, and is called between replays, not recorded. ``probes`` are the
    blocks' first and last weights by name, layers and their parameters, whose gradients are compared.
    """

    def __init__(
        self,
        variant: Variant,
        size: str,
        tokens: int,
        device: torch.device,
        blocks: int,
        checkpoint: str = "none",
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.variant, self.device, self.blocks = variant, device, blocks
        config = LlamaConfig(
            **SIZES[size],
            num_hidden_layers=blocks,
            max_position_embeddings=tokens,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        )
        torch.manual_seed(0)
        with device:
            self.model = Slice(config, liger=variant.liger)
        ids = torch.arange(tokens, device=device)[None]
        self.positions = self.model.rotary(torch.zeros((), dtype=torch.bfloat16, device=device), ids)
        if variant.graphed:
            self.model.bfloat16()
        self.model = variant.convert(self.model, sharded=not variant.graphed)
        self.probes = probes(self.model.blocks[0], self.model.blocks[-1])
        for index, block in enumerate(self.model.blocks):
            self.model.blocks[index] = variant.compile(checkpointed(block, checkpoint), device)
        if not variant.graphed:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
            for part in (self.model.embedding, *self.model.blocks, self.model.lm_head, self.model):
                fully_shard(part, mp_policy=policy)
        self.loss_of = variant.compile(cross_entropy, device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, fused=True, capturable=variant.graphed
        )
        variant.precompute(self.model)

    def pass_through_blocks(self, batch: Batch) -> None:
        """Forward and backward of the blocks alone. No gradient of the batch stays, which other peaks would count."""
        self.model(batch.hidden, self.positions, False).backward(batch.cotangent)
        batch.hidden.grad = None

    def loss_and_gradients(self, batch: Batch) -> torch.Tensor:
        """Forward and backward of all; the loss, without a graph."""
        loss: torch.Tensor = self.loss_of(self.model(batch.tokens, self.positions, True), batch.targets)
        loss.backward()
        return loss.detach()

    def step(self, batch: Batch) -> torch.Tensor:
        """All of a training step; the loss, without a graph."""
        loss = self.loss_and_gradients(batch)
        self.optimizer.step()
        self.clear()
        self.variant.precompute(self.model)
        return loss

    def saved(self) -> Callable[[], None]:
        """What takes weights and the optimizer's state back to what they are now, in place."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.parameters(), *states]
        values = [tensor.detach().clone() for tensor in tensors]

        def restore() -> None:
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)

        return restore

    def clear(self) -> None:
        """No gradients."""
        self.optimizer.zero_grad()

    def between(self) -> None:
        """What stands between two passes where a step would be: the weights count as changed, their scales are new."""
        self.clear()
        self.variant.mark_changed(self.model)
        self.variant.precompute(self.model)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of the probes, this rank's part, on the CPU."""
        weights = {name: getattr(layer, weight) for name, (layer, weight) in self.probes.items()}
        return {name: local_tensor(weight.grad).cpu() for name, weight in weights.items()}


def probes(first: nn.Module, last: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Layers of the first block and of the last by name, with the names of their weights; q's rows come first."""
    if isinstance(first, transformer_engine_layers.Block):
        return {"first": (first.qkv, "weight"), "last": (last.mlp, "fc2_weight")}
    return {"first": (first.self_attn.q_proj, "weight"), "last": (last.mlp.down_proj, "weight")}


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[0].float(), targets)
