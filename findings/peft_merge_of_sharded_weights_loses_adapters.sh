#!/usr/bin/env bash
# PEFT 0.21.2 over torch 2.13.0's FSDP2: merge_adapter of DoRA, and with safe_merge=True of LoRA too, loses the adapter.
#
# Both assign the merged weight as weight.data = merged. A DTensor takes such an assignment without an error, and without
# effect: the local shard, which every operator reads, stays. PEFT then holds the adapter for merged and leaves it out of
# forward. LoRA without safe_merge adds in place, and is right. The same is behind torch.nn.utils.vector_to_parameters,
# and p.data = p.data.bfloat16(), after which p.dtype is bfloat16 and the shard and what it multiplies float32.
#
# Expected: the same output before and after a merge. Seen: relative differences near 1, and no error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 peft==0.21.2 transformers==5.24.0 numpy

cat >"$folder/seen.py" <<'PYTHON'
import os
import warnings

import peft
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import vector_to_parameters

warnings.filterwarnings("ignore")
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))


def sharded(dora: bool) -> nn.Module:
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["0"], r=4, init_lora_weights=False, use_dora=dora)
    model = peft.get_peft_model(nn.Sequential(nn.Linear(16, 16)), config)
    return fully_shard(model, mesh=mesh).eval()


@torch.no_grad()
def off(dora: bool, safe: bool) -> float:
    model, x = sharded(dora), torch.ones(2, 16)
    y = model(x)
    model.reshard()
    model.merge_adapter(safe_merge=safe)
    return ((model(x) - y).norm() / y.norm()).item()


seen = {(dora, safe): off(dora, safe) for dora in (False, True) for safe in (False, True)}
model = nn.Sequential(nn.Linear(4, 4, bias=False))
fully_shard(model, mesh=mesh)
before = model[0].weight.full_tensor()
vector_to_parameters(torch.zeros(16), model.parameters())
unchanged = torch.equal(model[0].weight.full_tensor(), before)
if rank == 0:
    print(f"torch {torch.__version__}, PEFT {peft.__version__}, FSDP2: output after merge_adapter, relative difference")
    for (dora, safe), value in seen.items():
        print(f"{'DoRA' if dora else 'LoRA'}, safe_merge={safe}: {value:.1e}")
    print(f"vector_to_parameters(zeros) left the weights unchanged: {unchanged}", flush=True)
dist.barrier()
dist.destroy_process_group()
right = seen.pop((False, False)) < 1e-5 and all(value > 0.1 for value in seen.values()) and unchanged
raise SystemExit(not right)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/seen.py"
