#!/usr/bin/env bash
# torchao 0.18.0, torch 2.13.0: AdamW with bf16_stochastic_round=True rounds the same weight otherwise on each replica.
#
# Replicas of a weight (HSDP's, DDP's) stay equal because each makes the same step from the same averaged gradient.
# With stochastic rounding that step is drawn from the default generator, in the same state on all ranks only as long as
# every rank has drawn as much as the others. One draw more on one rank, such as a collator's that masks more tokens of
# a longer batch, or dropout on it, and the replicas part: nothing compares them, and an averaged gradient does not pull
# them together. A checkpoint has one replica's weights. Seeds that differ by rank, as augmentation and dropout want
# them, part them from the first step. On GPUs DTensor's own random operators keep replicas equal.
# This one draws on the shard.
#
# Expected: equal replicas, as without stochastic rounding. Seen: most weights differ after 20 steps.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 torchao==0.18.0 numpy

cat >"$folder/train.py" <<'PYTHON'
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchao.optim import _AdamW

WIDTH, STEPS = 256, 20


def parted(kind: str, *, stochastic: bool, draws_more: bool) -> float:
    """The share of the weights in which two replicas differ after training."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).bfloat16()
    if kind == "HSDP":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = _AdamW(model.parameters(), lr=1e-4, bf16_stochastic_round=stochastic)
    data = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        x = torch.randn(32, WIDTH, generator=data).bfloat16()
        if draws_more and step == 0 and rank == 1:
            torch.rand(1)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    own = torch.cat([getattr(p, "_local_tensor", p).detach().float().flatten() for p in model.parameters()])
    other = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(other, own)
    return (other[0] != other[1]).float().mean().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    as_seen = True
    for kind in ("HSDP", "DDP"):
        for stochastic, draws_more in ((False, True), (True, False), (True, True)):
            share = parted(kind, stochastic=stochastic, draws_more=draws_more)
            how = f"stochastic rounding {stochastic}, rank 1 draws one number more {draws_more}"
            if dist.get_rank() == 0:
                print(f"{kind}, {how}: {share:.1%} of the weights differ after {STEPS} steps")
            as_seen &= share > 0.5 if stochastic and draws_more else share == 0
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(str(int(as_seen)))
    dist.barrier()
    dist.destroy_process_group()
PYTHON

OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES='' "$folder/venv/bin/python" -W ignore -m torch.distributed.run --standalone \
    --nproc-per-node 2 "$folder/train.py" "$folder/seen" 2>"$folder/log" || { cat "$folder/log"; exit 1; }
"$folder/venv/bin/python" - "$folder/seen" <<'PYTHON'
import sys
from pathlib import Path

raise SystemExit(Path(sys.argv[1]).read_text() != "1")
PYTHON
