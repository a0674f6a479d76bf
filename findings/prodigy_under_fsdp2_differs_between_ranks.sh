#!/usr/bin/env bash
# prodigyopt 1.1.2 with torch 2.13.0's FSDP2: each rank takes its own learning rate from its own shards.
#
# Prodigy estimates its rate d from sums over all parameters. Its argument fsdp_in_use says that PyTorch's sharding is
# detected by itself; what is looked for is an attribute of FSDP1's flat parameters, which FSDP2's DTensors lack. Their
# sums are read as plain numbers, each rank's own, so the shards of one weight are stepped at different rates. No error,
# and the loss goes down. fsdp_in_use=True reduces the sums by a tensor on the GPU.
#
# Expected: one d on all ranks, the unsharded run's. Seen: another on each rank, neither of them that of the unsharded run.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 prodigyopt==1.1.2 numpy

cat >"$folder/seen.py" <<'PYTHON'
import os
from importlib.metadata import version

import torch
import torch.distributed as dist
from prodigyopt import Prodigy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")


def rate(sharded: bool) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = Prodigy(model.parameters(), lr=1.0)
    for step in range(8):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        x = x[4 * rank : 4 * rank + 4] if sharded else x
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.param_groups[0]["d"]


of_ranks: list[float] = [0.0, 0.0]
dist.all_gather_object(of_ranks, float(rate(True)))
alone = float(rate(False))
if rank == 0:
    print(f"torch {torch.__version__}, prodigyopt {version('prodigyopt')}: d after 8 steps of the same batches")
    print(f"one process {alone:.4e}, FSDP2 on two ranks {of_ranks[0]:.4e} and {of_ranks[1]:.4e}", flush=True)
dist.barrier()
dist.destroy_process_group()
near = [abs(found / alone - 1) < 0.01 for found in of_ranks]
raise SystemExit(any(near) or abs(of_ranks[0] / of_ranks[1] - 1) < 0.01)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/seen.py"
