"""Float8 under Hugging Face accelerate.

    accelerate launch --use_fsdp --fsdp_version 2 recipes/trainers/accelerate_fsdp2.py

torchrun starts it as well. accelerate shards on GPUs alone: on CPUs each rank would train a whole model by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from f8sub_example import BLOCK, Tokens, build_model
from torch.utils.data import DataLoader

import f8sub
from f8sub.integrations.accelerate import prepare


def fsdp_plugin(**options: Any) -> FullyShardedDataParallelPlugin:
    """FSDP2 that shards block by block; ``options`` are the plugin's."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[BLOCK],
        # Without this, mixed_precision="bf16" also reduces gradients and returns the loss in bf16.
        mixed_precision_policy={
            "param_dtype": torch.bfloat16,
            "reduce_dtype": torch.float32,
            "output_dtype": torch.float32,
        },
        **options,
    )


class AccelerateLoop:
    """A model, converted and prepared, its optimizer, and the loop over both."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        model = build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
        data = DataLoader(Tokens(), batch_size=8)
        # In place of accelerator.prepare.
        self.model, self.optimizer, data = prepare(accelerator, model, optimizer, data, recipe="tensorwise")
        self.batches = iter(data)

    def train(self, batches: int) -> list[float]:
        """The losses of the next batches; ``gradient_accumulation_steps`` of them make one step."""
        losses = []
        for _ in range(batches):
            batch = next(self.batches)
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def main() -> None:
    """Train and save."""
    accelerator = Accelerator(
        mixed_precision="bf16", gradient_accumulation_steps=2, fsdp_plugin=fsdp_plugin()
    )
    if accelerator.distributed_type is not DistributedType.FSDP:
        raise SystemExit(
            "accelerate shards on GPUs alone, and every rank would train a whole model by itself; for CPUs see "
            "docs/trainers/accelerate.md"
        )
    loop = AccelerateLoop(accelerator)
    with f8sub.prefer_cudnn_attention():  # where it is the fastest; in the bf16 run, too
        losses = loop.train(50)
    accelerator.save_state("runs/accelerate_fsdp2")
    accelerator.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
