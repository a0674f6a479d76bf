"""Send the training's own float8 weights to an inference engine after every step: 1 byte per element, no second cast.

    torchrun --nproc-per-node 3 recipes/trainers/rl_weight_sync.py

The last rank stands for the engine; the others train under FSDP2. An engine that quantizes the weights itself has other
codes than the training, and its samples drift away from the policy that is trained. Here each step compares the weights
that both multiply: they are the same to the bit. (Their sums may differ still: kernels add in different orders.)

Runs on CPUs, and on GPUs with ``--nproc-per-node`` one more than ranks that train.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from f8sub_engine import Engine, digest
from f8sub_example import Tokens, build_model
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import f8sub

STEPS = 20
BF16 = torch.bfloat16


class Policy:
    """A model that trains under FSDP2, and digests of the weights that its forward multiplied last."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        self.model: Any = build_model().to(self.device)
        f8sub.convert_to_float8(self.model, recipe="rowwise")
        self.multiplied: dict[str, str] = {}
        for fqn, layer in self.model.named_modules():
            if isinstance(layer, f8sub.Float8Linear):
                layer.register_forward_hook(lambda layer, _x, _y, fqn=fqn: self._note(fqn, layer.weight))
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
        for block in self.model.model.layers:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, fused=True)
        f8sub.precompute_scales(self.model)

    def _note(self, fqn: str, weight: Any) -> None:
        operand = weight.rowwise
        self.multiplied[fqn] = digest(operand.data.float() * operand.scale_inv)

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """Train on a batch; in reinforcement learning these are the engine's samples and their advantages."""
        loss = self.model(**{name: tensor.to(self.device) for name, tensor in batch.items()}).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        f8sub.precompute_scales(self.model)
        return float(loss)

    def evaluate(self, batch: dict[str, torch.Tensor]) -> None:
        """A forward with the weights as they are now."""
        with torch.no_grad():
            self.model(**{name: tensor.to(self.device) for name, tensor in batch.items()})


def send(weights: Iterable[tuple[str, torch.Tensor]], engine: int) -> None:
    """Send weights as they are gathered; rank 0 sends, and the other ranks gather with it."""
    for name, tensor in weights:
        if dist.get_rank() == 0:
            dist.send_object_list([(name, tensor.dtype, tensor.shape)], engine)
            dist.send(tensor.view(torch.uint8).view(-1).cpu(), engine)
    if dist.get_rank() == 0:
        dist.send_object_list([None], engine)


def received() -> Iterator[tuple[str, torch.Tensor]]:
    """What rank 0 sends."""
    while True:
        header: list[Any] = [None]
        dist.recv_object_list(header, 0)
        if header[0] is None:
            return
        name, dtype, shape = header[0]
        data = torch.empty(shape.numel() * dtype.itemsize, dtype=torch.uint8)
        dist.recv(data, 0)
        yield name, data.view(dtype).view(shape)


def main(steps: int = STEPS) -> list[int]:
    """Train and synchronize; the number of layers whose weights differ, after each step."""
    rank, engine_rank = dist.get_rank(), dist.get_world_size() - 1
    mesh = DeviceMesh("cpu" if not torch.cuda.is_available() else "cuda", list(range(engine_rank)))
    mismatches, engine = [], Engine()
    policy = Policy(mesh) if rank != engine_rank else None
    data = Tokens()
    for step in range(steps):
        if policy is None:
            engine.load_weights(received())
            dist.send_object_list([(engine.digests(), engine.bytes)], 0)
            continue
        batch = torch.utils.data.default_collate([data[(step * 8 + i) % len(data)] for i in range(8)])
        loss = policy.step(batch)
        send(f8sub.float8_weights(policy.model, "compressed-tensors"), engine_rank)
        policy.evaluate(batch)
        if rank == 0:
            answer: list[Any] = [None]
            dist.recv_object_list(answer, engine_rank)
            digests, size = answer[0]
            differ = [fqn for fqn, own in policy.multiplied.items() if digests.get(fqn) != own]
            mismatches.append(len(differ))
            layers = f"{len(differ)} of {len(policy.multiplied)} layers differ"
            print(f"step {step}: loss {loss:.4f}, {size:,} bytes sent, {layers}")
    return mismatches


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(min(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count() - 1))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    with f8sub.prefer_cudnn_attention():  # where it is the fastest
        main()
    dist.destroy_process_group()
