#!/usr/bin/env bash
# torch 2.13.0 (and 2.15.0): torch.optim.Muon under FSDP2 sends each matrix 15 times a step, not once.
#
# Newton-Schulz iterations run on the sharded DTensor, operator by operator. Each of the 5 iterations has 3 products, and
# DTensor gathers an operand of each. The numbers are right. A tall matrix of the same size, which Muon transposes, needs
# 11 all-reduces and no all-gather. So a Llama of 32 blocks with 7 matrices each issues over 3,000 collectives a step in the
# optimizer alone, which nothing overlaps; its forward and backward issue 96.
#
# Expected: one all-gather of a matrix, or none and one all-to-all. Seen: 15 all-gathers and 1 all-reduce for each matrix.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

cat >"$folder/seen.py" <<'PYTHON'
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))


def collectives(rows: int, cols: int) -> dict[str, int]:
    layer = fully_shard(nn.Linear(cols, rows, bias=False), mesh=mesh)
    optimizer = torch.optim.Muon(layer.parameters(), lr=0.1)
    layer(torch.randn(4, cols)).square().sum().backward()
    with CommDebugMode() as found:
        optimizer.step()
    return {str(name).rpartition(".")[2]: count for name, count in found.get_comm_counts().items()}


seen = {shape: collectives(*shape) for shape in ((64, 64), (64, 256), (256, 64))}
if rank == 0:
    print(f"torch {torch.__version__}: collectives of one step of Muon on one matrix that two ranks shard by rows")
    for (rows, cols), counts in seen.items():
        print(f"{rows}x{cols}: {counts}", flush=True)
dist.barrier()
dist.destroy_process_group()
square = seen[64, 64].get("all_gather_into_tensor"), seen[64, 256].get("all_gather_into_tensor")
raise SystemExit(square != (15, 15) or seen[256, 64] != {"all_reduce": 11})
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/seen.py"
