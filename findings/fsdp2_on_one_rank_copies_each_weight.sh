#!/usr/bin/env bash
# torch 2.13.0, FSDP2: fully_shard on one rank copies every parameter in forward and again in backward, one call each.
#
# There is nothing to gather, and no collective runs. But an unsharded parameter has memory of its own, which is filled
# by copy_ when the module's forward or backward begins: a group of parameters is one operator on two ranks, and one
# operator per parameter on one. The copies run where the module waits for its parameters, so prefetching moves none of
# them ahead. Gradients are copied twice: into the input of a reduction that does not happen, and from there.
#
# Expected of one rank: the sharded parameter is the whole one, and nothing is copied. Seen: of a module of 8 parameters
# in 4 groups, 16 copies and 4 of gradients; on two ranks 8 joined copies. No unsharded weight shares memory.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

cat >"$folder/seen.py" <<'PYTHON'
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode


class Copies(TorchDispatchMode):
    """Counts what moves parameters and gradients."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fsdp" or func is torch.ops.aten.copy_.default:
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
x = torch.randn(8, 64)
model(x).sum().backward()
with Copies() as copies:
    model(x).sum().backward()

layer = model[0]
sharded = layer.weight.to_local().data_ptr()
layer.unshard()
shared = layer.weight.data_ptr() == sharded
if dist.get_rank() == 0:
    print(dict(sorted(copies.counts.items())), "shares memory" if shared else "memory of its own")
dist.destroy_process_group()
PYTHON

run() {
    "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node "$1" "$folder/seen.py" 2>/dev/null
}
one=$(run 1)
two=$(run 2)
echo "one rank:  $one"
echo "two ranks: $two"
"$folder/venv/bin/python" - "$one" "$two" <<'PYTHON'
import sys

one, two = sys.argv[1:]
alone = "{'aten::copy_': 20, 'fsdp::chunk_cat': 4} memory of its own"
if one != alone or "'fsdp::all_gather_copy_in': 8" not in two:
    raise SystemExit(f"this has changed: {one}, {two}")
PYTHON
