#!/usr/bin/env bash
# torch 2.13.0: the second run of a job computes with another rank's compiled code where compiled functions take DTensors.
#
# Two ranks of one machine compile a function of DTensors. What a rank computes depends on its place in the mesh: which
# part of a replicated matrix it keeps, which rows of a sharded embedding it has, how many rows are in its shard. Each
# rank's code has that as constants. Code is kept on disk by default, in a folder that the ranks of a machine share, and
# the key of AOTAutograd's cache has a DTensor's mesh, placements, and shape of the whole, which are those of both ranks.
# A job that starts with an empty folder compiles on both ranks and is right. The same job started again finds two
# entries under one key, and both ranks load the same.
#
# Expected: the numbers of eager code in every run. Seen: those in the first run; in the second other numbers on one rank
# or both, without a warning, and where shards are uneven an AssertionError about sizes. TORCHINDUCTOR_AUTOGRAD_CACHE=0,
# or a TORCHINDUCTOR_CACHE_DIR for each rank, has every run right. torch 2.15.0 puts the device into the key: it is the
# same on ranks without GPUs, and for those there it did the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

cat >"$folder/job.py" <<'PYTHON'
import json
import sys
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

warnings.filterwarnings("ignore")


def keep_a_part(x: DTensor) -> DTensor:
    return (x + 1).redistribute(placements=[Shard(0)]) * 2


def look_up(tokens: DTensor, table: DTensor) -> DTensor:
    return F.embedding(tokens, table).redistribute(placements=[Replicate()]) + 1


def double(x: DTensor) -> DTensor:
    return x * 2


if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))

    def placed(x: torch.Tensor, placement: Replicate | Shard) -> DTensor:
        return distribute_tensor(x, mesh, [placement])

    rows, table = torch.arange(16.0).view(8, 2), torch.arange(20.0).view(10, 2)
    calls = {
        "a replicated matrix of which each keeps a part": (keep_a_part, placed(rows, Replicate())),
        "an embedding with sharded rows": (
            look_up,
            placed(torch.tensor([0, 3, 5, 9]), Replicate()),
            placed(table, Shard(0)),
        ),
        "9 rows on 2 ranks": (double, placed(torch.arange(18.0).view(9, 2), Shard(0))),
    }
    seen = {}
    for name, (function, *given) in calls.items():
        expected = function(*given).to_local()
        try:
            found = torch.compile(function, fullgraph=True, dynamic=False)(*given).to_local()
            seen[name] = "right" if torch.equal(found, expected) else "wrong"
        except AssertionError as error:
            seen[name] = f"AssertionError: {str(error).splitlines()[0]}"
        dist.barrier()
    every: list = [None, None]
    dist.all_gather_object(every, seen)
    if dist.get_rank() == 0:
        print(json.dumps({name: [of_rank[name] for of_rank in every] for name in calls}), file=open(sys.argv[1], "w"))
    dist.barrier()
    dist.destroy_process_group()
PYTHON

cat >"$folder/compare.py" <<'PYTHON'
import json
import sys
from pathlib import Path

import torch

runs = {name: json.loads(Path(sys.argv[1], f"{name}.json").read_text()) for name in ("first", "second", "without", "again")}
print(f"torch {torch.__version__}, 2 gloo ranks; by rank, is compiled code eager code's number")
for name, calls in runs.items():
    for call, ranks in calls.items():
        print(f"{name:8} {call}: {ranks}")
is_right = {name: all(each == "right" for ranks in calls.values() for each in ranks) for name, calls in runs.items()}
part, table, uneven = runs["second"].values()
as_seen = (
    is_right == {"first": True, "second": False, "without": True, "again": True}
    and sorted(part) == ["right", "wrong"]
    and table == ["wrong", "wrong"]
    and sum(each.startswith("AssertionError: expected size") for each in uneven) == 1
)
raise SystemExit(not as_seen)
PYTHON

run() {  # name of the run
    "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
        "$folder/job.py" "$folder/$1.json" 2>"$folder/$1.log" || { cat "$folder/$1.log"; exit 1; }
}
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
TORCHINDUCTOR_CACHE_DIR=$folder/cache run first
TORCHINDUCTOR_CACHE_DIR=$folder/cache run second
export TORCHINDUCTOR_AUTOGRAD_CACHE=0
TORCHINDUCTOR_CACHE_DIR=$folder/other run without
TORCHINDUCTOR_CACHE_DIR=$folder/other run again
"$folder/venv/bin/python" "$folder/compare.py" "$folder"
