#!/usr/bin/env bash
# torch 2.13.0 (and 2.15.0), torch.distributed.checkpoint: of states that differ between ranks it saves some of one rank and
# some of another.
#
# Tensors and objects that are not DTensors count as the same on all ranks, and one rank writes each. Which one is decided
# entry by entry, so that ranks write equally many bytes. So a data loader's or a generator's state that each rank puts
# under the same names is not saved as rank 0's: one entry is rank 0's, another rank 1's, and every rank loads the mixture,
# which no rank had. That load gives all ranks equal states can be known; that they fit together cannot be relied on.
#
# Expected: each rank's own state, or rank 0's. Seen on both ranks: entries of rank 0 beside entries of rank 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

cat >"$folder/seen.py" <<'PYTHON'
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")


def state(of: float) -> dict[str, object]:
    return {"buffer": torch.full((1000,), of), "cursor": torch.full((1,), of), "epoch": int(of)}


with tempfile.TemporaryDirectory() as folder:
    shared = [folder]
    dist.broadcast_object_list(shared)
    dcp.save({"loader": state(rank)}, checkpoint_id=shared[0])
    loaded = {"loader": state(-1)}
    dcp.load(loaded, checkpoint_id=shared[0])
    dist.barrier()
found = {name: int(value if isinstance(value, int) else value[0]) for name, value in loaded["loader"].items()}
print(f"torch {torch.__version__}, rank {rank}: the rank whose value was loaded: {found}", flush=True)
dist.barrier()
dist.destroy_process_group()
raise SystemExit(set(found.values()) != {0, 1})
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/seen.py"
