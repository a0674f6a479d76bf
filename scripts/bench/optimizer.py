"""Times clipping, AdamW and the scales of the new weights: by torch, and in one pass by ``f8sub.optim.fuse_step``.

The weights are those of blocks of a Llama 3 8B as one of two GPUs has them, float32, sharded by FSDP2 over one GPU, and
in a weight-decay group. Both ways step the same model in turns, launched from Python as a trainer does. Times
are by events, medians; the bytes are those that each part cannot avoid. First one step of a small model is compared, to
the bit, with torch's fused kernel; and tiles of the kernel are timed alone.

    python scripts/bench/optimizer.py --blocks 16 --json optimizer.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import f8sub
from f8sub.kernels.triton import adamw_launch

SHAPES = ((2048, 4096), (512, 4096), (512, 4096), (2048, 4096), (7168, 4096), (7168, 4096), (2048, 14336))
"""(N, K) of half of the rows of q, k, v, o, gate, up and down."""

HEAD_START = 60_000_000
"""Cycles, some 30 ms, that the GPU is kept busy before what is timed."""

TILES = ((1024, 1024, 4), (512, 1024, 2), (1024, 8192, 4))
"""BLOCK, SPAN and WARPS of ``adamw_launch``."""


def model_of(blocks: int, device: str) -> nn.Sequential:
    """Converted and sharded, with a norm beside each block's layers."""
    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers += [nn.Linear(k, n, bias=False, device=device) for n, k in SHAPES]
        layers.append(nn.RMSNorm(4096, device=device))
    model = f8sub.convert_to_float8(nn.Sequential(*layers), recipe="tensorwise")
    for start in range(0, len(layers), len(SHAPES) + 1):
        fully_shard(list(model[start : start + len(SHAPES) + 1]))
    fully_shard(model)
    return model


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """As torchtitan makes it."""
    groups: dict[float, list[nn.Parameter]] = {0.1: [], 0.0: []}
    for parameter in model.parameters():
        groups[0.1 if parameter.dim() > 1 else 0.0].append(parameter)
    given = [{"params": some, "weight_decay": decay} for decay, some in groups.items()]
    return torch.optim.AdamW(given, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)


def give_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        local = torch.randn_like(parameter.to_local().detach().clone()) * 1e-3
        parameter.grad = DTensor.from_local(local, parameter.device_mesh, parameter.placements)


def compared(device: str) -> dict[str, Any]:
    """Elements of weights and states that differ from torch's after three clipped steps, and by how much at most."""
    models = [nn.Sequential(nn.Linear(4096, 1024), nn.LayerNorm(1024)).to(device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-4, weight_decay=0.1, fused=True) for m in models]
    fused = f8sub.optim.fuse_step(optimizers[0])
    for seed in range(3):
        for model in models:
            torch.manual_seed(seed)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
        # By torch's norm in both: f8sub's may have another last bit.
        fused.clip_by(nn.utils.clip_grad_norm_(models[1].parameters(), 1.0), 1.0)
        for optimizer in optimizers:
            optimizer.step()
    pairs = {"weights": [], "exp_avg": [], "exp_avg_sq": []}
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        pairs["weights"].append((one.detach(), other.detach()))
        for name in ("exp_avg", "exp_avg_sq"):
            pairs[name].append((optimizers[0].state[one][name], optimizers[1].state[other][name]))
    found: dict[str, Any] = {"why_torch": fused.why_torch}
    for name, some in pairs.items():
        differ = sum(int((a != b).sum()) for a, b in some)
        largest = max(float(((a - b).abs() / b.abs().clamp(min=1e-30)).max()) for a, b in some)
        found[name] = {"differ": differ, "of": sum(a.numel() for a, _ in some), "largest_relative": largest}
    return found


def timed(parts: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Milliseconds of each part, in order, and of all together."""
    times: dict[str, list[float]] = {name: [] for name in (*parts, "all")}
    for turn in range(rounds + 2):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]
        # As in training, where backward keeps the GPU busy while the host launches what follows.
        torch.cuda._sleep(HEAD_START)
        events[0].record()
        for event, part in zip(events[1:], parts.values(), strict=True):
            part()
            event.record()
        torch.cuda.synchronize()
        if turn > 1:
            for name, start, end in zip(parts, events, events[1:], strict=False):
                times[name].append(start.elapsed_time(end))
            times["all"].append(events[0].elapsed_time(events[-1]))
    return {name: round(statistics.median(each), 3) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    began = time.perf_counter()
    device = "cuda"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    found["compared"] = compared(device)
    print(json.dumps(found), flush=True)
    model = model_of(given.blocks, device)
    give_gradients(model)
    numel = sum(parameter.to_local().numel() for parameter in model.parameters())
    parameters = list(model.parameters())
    optimizer = adamw(model)
    f8sub.precompute_scales(model)
    ways: dict[str, dict[str, Callable[[], Any]]] = {
        "torch": {
            "clip": lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
            "step": optimizer.step,
            "scales": lambda: f8sub.precompute_scales(model),
        }
    }
    found["ms"] = {"torch": timed(ways["torch"], given.rounds)}
    print(json.dumps(found["ms"]), flush=True)
    fused = f8sub.optim.fuse_step(optimizer)
    for block, span, warps in TILES:
        adamw_launch.BLOCK, adamw_launch.SPAN, adamw_launch.WARPS = block, span, warps
        adamw_launch._tables.cache_clear()
        parts = {
            "clip": lambda: fused.clip_grad_norm_(1.0),
            "step": optimizer.step,
            "scales": lambda: f8sub.precompute_scales(model),
        }
        name = f"fused, {block} of {span}, {warps} warps"
        found["ms"][name] = timed(parts, given.rounds)
        # Four reads and three writes of float32.
        rate = 28 * numel / found["ms"][name]["step"] / 1e6
        print(
            f"{name}: {found['ms'][name]}, {rate:.0f} GB/s in the step, by torch: {fused.why_torch}",
            flush=True,
        )
    source, target = (torch.empty(numel, device=device) for _ in range(2))
    copy = timed({"copy": lambda: target.copy_(source)}, given.rounds)["copy"]
    found |= {"numel": numel, "copy_gb_per_s": 8 * numel / copy / 1e6, "seconds": time.perf_counter() - began}
    print(f"{numel} parameters; a copy: {found['copy_gb_per_s']:.0f} GB/s; {found['seconds']:.0f} s")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
