"""Float8 under Lightning's ModelParallelStrategy.

torchrun --nproc-per-node gpu recipes/trainers/lightning_fsdp2.py

Runs on CPUs too, with a number in place of ``gpu``.
"""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from f8sub_example import Tokens, build_model
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

import f8sub
from f8sub.integrations.lightning import Float8Callback


class Module(lightning.LightningModule):
    """A model that the callback converts and that is then sharded where Lightning asks for that."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = build_model()

    def configure_model(self) -> None:
        """Shard; Lightning calls this more than once."""
        if isinstance(self.model, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model.model.layers:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3, fused=True)

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of a batch."""
        loss: torch.Tensor = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss


def build_trainer(folder: str, **options: Any) -> lightning.Trainer:
    """A Trainer that shards over all of its devices; ``options`` are the Trainer's."""
    ranks, ranks_a_node = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    chosen: dict[str, Any] = {
        "default_root_dir": folder,
        "devices": ranks_a_node,
        "num_nodes": ranks // ranks_a_node,
        "strategy": ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
        "max_steps": 50,
        "gradient_clip_val": 1.0,
        "callbacks": [Float8Callback("tensorwise")],
    }
    return lightning.Trainer(**{**chosen, **options})


def main() -> None:
    """Train; Lightning saves at the end."""
    with f8sub.prefer_cudnn_attention():  # where it is the fastest; in the bf16 run, too
        build_trainer("runs/lightning_fsdp2").fit(Module(), DataLoader(Tokens(), batch_size=8))


if __name__ == "__main__":
    main()
