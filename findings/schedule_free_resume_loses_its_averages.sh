#!/usr/bin/env bash
# schedulefree 1.4.1 with torch 2.13.0's torch.distributed.checkpoint: a resumed run has no average and no moments.
#
# The documented way to resume takes the state dict of a new optimizer, loads into it, and sets it. To have tensors to load
# into, get_optimizer_state_dict lets an optimizer without states take a step of zeros. schedulefree's own rule is to call
# train() first; train() touches self.state[p], which creates an empty state for each parameter. So the optimizer counts
# as initialized, its states have no names, and nothing is loaded into them. Its counters (k, lr_max, weight_sum) are in
# param_groups and are loaded. Without train() the step of zeros raises. AdamW resumes to the bit in the same script.
#
# Expected: an uninterrupted run's weights. Seen: no tensor is loaded, no error, and other weights.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 schedulefree==1.4.1 numpy

cat >"$folder/seen.py" <<'PYTHON'
import tempfile
from importlib.metadata import version

import schedulefree
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def new(kind: str):
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    if kind == "AdamW":
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05)
    optimizer.train()
    return model, optimizer


def train(model, optimizer, steps):
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def resumed(kind: str, folder: str):
    model, optimizer = new(kind)
    train(model, optimizer, range(4))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    train(model, optimizer, range(4, 8))
    again, fresh = new(kind)
    weights, states = get_state_dict(again, fresh)
    named = sum(len(each) for each in states["state"].values())
    loaded = {"model": weights, "optimizer": states}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(again, fresh, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    train(again, fresh, range(4, 8))
    return named, (again.weight - model.weight).abs().max().item()


print(f"torch {torch.__version__}, schedulefree {version('schedulefree')}")
seen = {}
for kind in ("AdamW", "schedulefree"):
    with tempfile.TemporaryDirectory() as folder:
        seen[kind] = resumed(kind, folder)
    print(f"{kind}: {seen[kind][0]} states to load into, largest difference from the run that went on {seen[kind][1]:.2e}")
raise SystemExit(not (seen["AdamW"] == (6, 0.0) and seen["schedulefree"][0] == 0 and seen["schedulefree"][1] > 1e-3))
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/seen.py"
