"""Float8 in a plain FSDP2 loop; recipes/pretrain.py is the full trainer.

    torchrun --nproc-per-node gpu recipes/trainers/plain_loop.py

Runs on CPUs too, with a number in place of ``gpu``.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from f8sub_example import Tokens, build_model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import f8sub


class PlainLoop:
    """A model, converted and then sharded, its optimizer, and the loop over both."""

    def __init__(self) -> None:
        self.device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        self.model: Any = build_model().to(self.device)
        f8sub.convert_to_float8(self.model, recipe="tensorwise")  # before fully_shard
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model.model.layers:
            fully_shard(block, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, fused=True)
        data = Tokens()
        self.batches = iter(DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False)))

    def train(self, steps: int) -> list[float]:
        """The losses of the next steps."""
        f8sub.precompute_scales(self.model)  # once, and after every step
        losses = []
        for _ in range(steps):
            batch = {name: tensor.to(self.device) for name, tensor in next(self.batches).items()}
            loss = self.model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            f8sub.precompute_scales(self.model)  # one all-reduce for all weights
            losses.append(loss.item())
        return losses

    def save(self, folder: str) -> None:
        """Write plain tensors that any number of ranks, with and without float8, can load."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: str) -> None:
        """Read what ``save`` wrote."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def main() -> None:
    """Train and save."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    loop = PlainLoop()
    if dist.get_rank() == 0:
        print(f8sub.conversion_report(loop.model))
    with f8sub.prefer_cudnn_attention():  # where it is the fastest; in the bf16 run, too
        losses = loop.train(50)
    loop.save("runs/plain_loop")
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
