#!/usr/bin/env bash
# torch 2.13.0: `.item()` of a sharded parameter's sum, norm, maximum or `any()` is the rank's own, without an error.
#
# DTensor computes as one tensor would, so `p.norm().item()` in a log, `if p.isnan().any():` in a guard and
# `p.abs().max().item()` in a scale should give what `full_tensor()` does, or raise. They give each rank its own part of
# the result, and ranks take different branches. Which reductions do so does not follow from their names: `std` and
# `argmax` are whole; `mean` is whole where the rows of the shards differ in number and the rank's own where they are
# equal; `p.norm()` is the rank's own, and `p.norm() / 2` or `p.sum() > 0` whole.
#
# Expected: one value on both ranks. Seen: the rank's own for six of ten, and for the mean of 8 rows, not of 7.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

cat >"$folder/seen.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

ASKED = {
    "sum": lambda w: w.sum(),
    "norm": lambda w: w.norm(),
    "largest": lambda w: w.abs().max(),
    "any below -1.9": lambda w: (w < -1.9).any(),
    "all above -1.9": lambda w: (w > -1.9).all(),
    "count above 0": lambda w: (w > 0).sum(),
    "mean": lambda w: w.mean(),
    "std": lambda w: w.std(),
    "norm / 2": lambda w: w.norm() / 2,
    "sum > 0": lambda w: w.sum() > 0,
}
WHOLE = {8: {"std", "norm / 2", "sum > 0"}, 7: {"mean", "std", "norm / 2", "sum > 0"}}


def ask(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh, expected = DeviceMesh("cpu", [0, 1]), True
    for rows in (8, 7):
        whole = torch.randn(rows, 5, generator=torch.Generator().manual_seed(0))
        shards = distribute_tensor(whole, mesh, [Shard(0)])
        for name, reduced in ASKED.items():
            found = [None, None]
            dist.all_gather_object(found, reduced(shards).item())
            right = reduced(whole).item()
            everywhere = all(abs(value - right) < 1e-4 for value in found)
            expected &= everywhere == (name in WHOLE[rows])
            if rank == 0:
                seen = ", ".join(f"{float(value):.3f}" for value in found)
                print(f"{rows} rows, {name}: {seen} on the ranks, {float(right):.3f} of the whole tensor")
    dist.destroy_process_group()
    raise SystemExit(not expected)


if __name__ == "__main__":
    print(f"torch {torch.__version__}, 2 ranks")
    torch.multiprocessing.spawn(ask, (sys.argv[1],), nprocs=2)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/seen.py" "$folder/store"
