#!/usr/bin/env bash
# ema-pytorch 0.8.3 over torch 2.13.0's FSDP2: the process ends, with exit status 0.
#
# FSDP2's modules refuse copy.deepcopy by an error that says what to do instead. EMA(model) catches it, prints that the
# model was not copyable and asks about lazy layers, and calls exit(). The status is that of success: torchrun reports
# nothing, a scheduler marks the job as completed, and a script that runs evaluation next goes on with an old checkpoint.
#
# Expected: the error of FSDP2, or a status that is not 0. Seen: SystemExit without a code.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 ema-pytorch==0.8.3 numpy

cat >"$folder/seen.py" <<'PYTHON'
import os
import subprocess
import sys
from importlib.metadata import version

import torch

JOB = '''
import torch.distributed as dist
from ema_pytorch import EMA
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (1,)))
average = EMA(model)
print("trained")
'''
alone = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
job = subprocess.run([sys.executable, "-c", JOB], capture_output=True, text=True, env={**os.environ, **alone})
print(f"torch {torch.__version__}, ema-pytorch {version('ema-pytorch')}: a job that stops at EMA(model) under FSDP2")
refused = "FSDP does not support deepcopy" in job.stdout
print(f"FSDP2's refusal is printed: {refused}, the end is reached: {'trained' in job.stdout}, exit status: {job.returncode}")
raise SystemExit(not refused or "trained" in job.stdout or job.returncode != 0)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/seen.py"
