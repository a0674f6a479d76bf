#!/usr/bin/env bash
# torch 2.13.0 (and 2.15.0), FSDP2: an optimizer that is created after an evaluation trains nothing of the root module.
#
# The root is not resharded after forward, so after a forward without a backward model.parameters() gives its gathered
# parameters. Backward puts the sharded ones in their place, and only those get gradients. Whatever was done with the
# others is lost without a word: an optimizer steps parameters that have no gradient, requires_grad_(False) freezes
# nothing, model.zero_grad() leaves the gradients of the root. get_optimizer_state_dict of an optimizer from before raises
# a KeyError. In a language model the root has the embedding, the last norm and the head.
#
# Expected: an evaluation changes nothing. Seen: the block trains, the root's weight has the bits from before; both lines.
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
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
x = torch.randn(4, 8)


def sharded() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(x)


def trained(evaluated: bool) -> list[bool]:
    model = sharded()
    if evaluated:
        evaluate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: value.full_tensor() for name, value in model.state_dict().items()}
    model(x).square().sum().backward()
    optimizer.step()
    after = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return [not torch.equal(before[name], after[name]) for name in ("0.weight", "1.weight")]


def cleared() -> list[bool]:
    model = sharded()
    model(x).square().sum().backward()
    evaluate(model)
    model.zero_grad()
    for module in (model[0], model):
        module.reshard()
    return [layer.weight.grad is None for layer in model]


def saved() -> str:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).square().sum().backward()
    optimizer.step()
    evaluate(model)
    try:
        return f"{len(get_optimizer_state_dict(model, optimizer)['state'])} states"
    except KeyError as error:
        return f"KeyError: {error}"


seen = trained(False), trained(True), cleared(), saved()
if rank == 0:
    print(f"torch {torch.__version__}: [block, root] trained: {seen[0]}, with an evaluation before the optimizer: {seen[1]}")
    print(f"[block, root] cleared by model.zero_grad() after an evaluation: {seen[2]}; its optimizer's state: {seen[3]}")
dist.barrier()
dist.destroy_process_group()
raise SystemExit(seen[:3] != ([True, True], [True, False], [True, False]) or "KeyError" not in seen[3])
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/seen.py"
