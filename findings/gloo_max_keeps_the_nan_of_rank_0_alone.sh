#!/usr/bin/env bash
# torch 2.13.0, gloo: all_reduce with MAX or MIN keeps a NaN that rank 0 has, and drops one that any other rank has.
#
# torch.max and torch.maximum hand on every NaN. The collective does not: with a NaN on rank 1, 2 or 3 every rank gets
# the largest number of the others, finite and plausible. A reduction of gradient norms, losses, largest absolute values
# or "found inf" flags by MAX therefore reports an overflow of one rank or hides it, by which rank it was. SUM keeps all.
#
# Expected: NaN on all ranks, whoever had it; or for nobody. Seen: NaN for rank 0's, 1.0 for all others'.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

cat >"$folder/reduce.py" <<'PYTHON'
import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 4


def run(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    found = []
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.SUM):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for owner in range(WORLD):
                value = torch.full((2,), 1.0, dtype=dtype)
                if rank == owner:
                    value[1] = math.nan
                dist.all_reduce(value, op)
                found.append((str(op).split(".")[-1], str(dtype), owner, bool(value[1].isnan())))
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, args=(sys.argv[1],), nprocs=WORLD)
    ranks = [json.loads(Path(sys.argv[1], f"{rank}.json").read_text()) for rank in range(WORLD)]
    print(f"torch {torch.__version__}, gloo, {WORLD} ranks; is the result NaN, on every rank, by who had the NaN")
    for op in ("MAX", "MIN", "SUM"):
        for dtype in ("torch.float32", "torch.float64", "torch.bfloat16"):
            row = [is_nan for one, of, _, is_nan in ranks[0] if (one, of) == (op, dtype)]
            print(f"{op} {dtype}: {dict(enumerate(row))}")
    same = all(rank == ranks[0] for rank in ranks)
    as_seen = all(is_nan == (op == "SUM" or owner == 0) for op, _, owner, is_nan in ranks[0])
    raise SystemExit(not (same and as_seen))
PYTHON
mkdir "$folder/run"
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/reduce.py" "$folder/run"
