#!/usr/bin/env bash
# torch 2.13.0 (and 2.15.0), FSDP2: zero_grad() does not clear gradients that were accumulated without synchronization.
#
# Between set_requires_gradient_sync(False) and the backward that reduces, gradients are at FSDP2's unsharded parameters,
# which neither optimizer.zero_grad() nor model.zero_grad() reaches. A micro-batch that a loop drops (its loss is not
# finite, its data are bad) is in the next reduction all the same, and NaN of it is NaN in the next step's gradient. DDP's
# no_sync keeps gradients in p.grad, and zero_grad() drops them.
#
# Expected after zero_grad(): the gradient of the last micro-batch alone. Seen: the dropped one's, 100 times as large, too.
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
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(rank)
good, dropped = torch.randn(4, 8), 100 * torch.randn(4, 8)


def gradient(kind: str, drop: bool) -> float:
    torch.manual_seed(0)
    layer = nn.Linear(8, 8, bias=False)
    model = fully_shard(layer, mesh=mesh) if kind == "FSDP2" else DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if drop and kind == "FSDP2":
        model.set_requires_gradient_sync(False)
        model(dropped).sum().backward()
        model.set_requires_gradient_sync(True)
    elif drop:
        with model.no_sync():
            model(dropped).sum().backward()
    optimizer.zero_grad()
    model.zero_grad()
    model(good).sum().backward()
    found = layer.weight.grad
    return (found.full_tensor() if kind == "FSDP2" else found).norm().item()


seen = {kind: gradient(kind, True) / gradient(kind, False) for kind in ("DDP", "FSDP2")}
if rank == 0:
    print(f"torch {torch.__version__}: norm of the gradient after a dropped micro-batch and zero_grad(), over that without it")
    print(", ".join(f"{kind} {ratio:.1f}" for kind, ratio in seen.items()), flush=True)
dist.barrier()
dist.destroy_process_group()
raise SystemExit(not (seen["DDP"] == 1 and seen["FSDP2"] > 20))
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/seen.py"
