#!/usr/bin/env bash
# torch 2.13.0: under torch.autocast FSDP2 does not free a model's weights after forward: a whole copy in bfloat16 stays.
#
# FSDP2 reshards each block's float32 parameters after forward. autocast has cast them, and its cache, which is there to
# cast each weight once, keeps all casts until the context ends. They are unsharded and of no use to anybody: backward
# gathers and casts again. So a rank holds the whole model in bfloat16, however many ranks shard it, and a step that runs
# inside the same context multiplies by weights from before it. autocast(cache_enabled=False) or FSDP2's own
# MixedPrecisionPolicy(param_dtype=torch.bfloat16) holds none.
#
# Expected after forward and backward: no cast alive. Seen: one for each of 6 layers, and 0 with cache_enabled=False.
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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
SIZE, LAYERS = 64, 6


class Casts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.weights: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype is torch.bfloat16 and out.shape == (SIZE, SIZE):
            self.weights.append(StorageWeakRef(out.untyped_storage()))
        return out


def alive(cached: bool) -> int:
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
        with Casts() as casts:
            model(torch.randn(4, SIZE)).sum().backward()
        return sum(not weight.expired() for weight in casts.weights)


seen = {cached: alive(cached) for cached in (True, False)}
if rank == 0:
    print(f"torch {torch.__version__}: whole weights in bfloat16 that a rank holds after forward and backward, of {LAYERS}")
    print(f"autocast {seen[True]}, autocast(cache_enabled=False) {seen[False]}", flush=True)
dist.barrier()
dist.destroy_process_group()
raise SystemExit(seen != {True: LAYERS, False: 0})
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/seen.py"
