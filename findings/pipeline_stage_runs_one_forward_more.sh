#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining: a step of 4 micro-batches runs 5 training forwards of each stage.
#
# Before the first micro-batch a stage runs its module once to learn shapes, in train mode and with gradients. So whatever
# a forward changes is changed once more: BatchNorm counts 5 batches, and its running mean has a batch that nobody gave.
# A later stage is given uninitialized memory for it. torch 2.14.1 puts buffers back and counts 4; hooks, and modules that
# keep what they saw elsewhere than in buffers, still see the forward there.
#
# Expected of 4 micro-batches: 4. Seen: 5 on both ranks, in the first step alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

cat >"$folder/stages.py" <<'PYTHON'
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
stage = PipelineStage(model, rank, 2, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
counted = []
for _ in range(2):
    before = int(model[1].num_batches_tracked)
    schedule.step(torch.randn(32, 8)) if rank == 0 else schedule.step(target=torch.zeros(32, 8))
    counted.append(int(model[1].num_batches_tracked) - before)
print(f"torch {torch.__version__}, rank {rank}: forwards of 4 micro-batches in steps 1 and 2: {counted}", flush=True)
dist.destroy_process_group()
raise SystemExit(counted != [5, 4])
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/stages.py"
