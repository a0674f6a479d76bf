#!/usr/bin/env bash
# accelerate 1.15.0, torch 2.13.0: on a machine without GPUs, ranks of torchrun train apart, though FSDP2 was asked for.
#
# torchrun starts two ranks, as for a test on a laptop or in CI, and the script gives Accelerator a plug-in that shards by
# FSDP2. One would guess that weights are sharded over gloo, which fully_shard does, or that there is an error. Instead
# accelerate takes each rank for a job by itself: one process, the main one, with a plain model, all of the data and no
# reduction of gradients. So two ranks print and save as the main process, and their models differ. A process group
# exists all the same. With ACCELERATE_USE_CPU=true the ranks are one job again, but replicas of DDP: the plug-in is
# dropped. Nothing is logged either way.
#
# Expected: two processes, one of them the main one, with sharded weights; or an error. Seen: twice one process, both the
# main one, whose weights are 16 of 16 elements apart after a step; by the variable, two replicas.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 accelerate==1.15.0 numpy

cat >"$folder/seen.py" <<'PYTHON'
import logging
import os
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

logging.disable(logging.WARNING)
accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
torch.manual_seed(int(os.environ["RANK"]))
model = nn.Linear(4, 4, bias=False)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(2, 4)).square().sum())
optimizer.step()
kinds = accelerator.num_processes, accelerator.is_main_process, type(model).__name__
weight = next(model.parameters()).detach().clone()
assert dist.is_initialized()
found, weights = [None, None], [torch.empty_like(weight) for _ in range(2)]
dist.all_gather_object(found, kinds)
dist.all_gather(weights, weight)
different = int((weights[0] != weights[1]).sum())
if dist.get_rank() == 0:
    print(f"processes, is the main one, model, by rank: {found}; {different} of {weight.numel()} elements differ")
dist.destroy_process_group()
alone, replicas = (1, True, "Linear"), [(2, True, "DistributedDataParallel"), (2, False, "DistributedDataParallel")]
right = (replicas, 0) if sys.argv[1] == "replicas" else ([alone, alone], weight.numel())
raise SystemExit((found, different) != right)
PYTHON

run() {
    CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --nproc-per-node 2 "$folder/seen.py" "$1"
}
echo "torch 2.13.0, accelerate 1.15.0, FullyShardedDataParallelPlugin(fsdp_version=2), torchrun with 2 ranks, no GPU"
run alone
ACCELERATE_USE_CPU=true run replicas
