#!/usr/bin/env bash
# torch 2.13.0: weights that FSDP2 ranks without GPUs draw after fully_shard are one shard, repeated on every rank.
#
# The documented way to set up a large model: create it on meta, fully_shard, to_empty, reset_parameters. Every rank
# calls torch.manual_seed(0), as examples do. On GPUs DTensor moves the generator of each rank to its shard's place. For
# CPU meshes it has nothing of the kind, warns that random operators "may not have complete support", and each rank
# draws its shard from the beginning of the same stream. So on two ranks the lower half of a square matrix is the upper
# half, and its rank is half of its size; on four it is a quarter. No loss or norm looks strange at first.
#
# With a seed of its own for each rank the shards differ, and so do values that all ranks should share: a dropout mask
# over a replicated DTensor then drops other elements on each rank, and the copies are replicas no more.
#
# Expected: the weights of an unsharded model, or at least no two equal rows. Seen: equal halves and quarters.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

cat >"$folder/draw.py" <<'PYTHON'
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

SIZE = 64

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    with torch.device("meta"):
        layer = nn.Linear(SIZE, SIZE, bias=False)
    fully_shard(layer)
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    weight = layer.weight.full_tensor().detach()
    parts = weight.chunk(world)
    are_equal = all(torch.equal(part, parts[0]) for part in parts)
    torch.manual_seed(0)
    whole = nn.Linear(SIZE, SIZE, bias=False).weight
    torch.manual_seed(rank)
    ones = distribute_tensor(torch.ones(8, 8), init_device_mesh("cpu", (world,)), [Replicate()])
    dropped = nn.functional.dropout(ones, 0.5)
    masks: list = [None] * world
    dist.all_gather_object(masks, dropped.to_local().tolist())
    if rank == 0:
        matrix_rank = int(torch.linalg.matrix_rank(weight))
        first = torch.equal(parts[0], whole[: SIZE // world])
        print(f"torch {torch.__version__}, {world} gloo ranks with one seed, a {SIZE} by {SIZE} weight:")
        print(f"  all shards are equal: {are_equal}; the first is that of the unsharded weight: {first}")
        print(f"  rank of the matrix: {matrix_rank}; unsharded: {int(torch.linalg.matrix_rank(whole))}")
        print(f"  with a seed per rank, placements {dropped.placements}: equal masks: {masks[0] == masks[1]}")
        as_seen = are_equal and first and matrix_rank == SIZE // world and masks[0] != masks[1]
        Path(sys.argv[1]).write_text(str(int(as_seen)))
    dist.barrier()
    dist.destroy_process_group()
PYTHON

for world in 2 4; do
    OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES='' "$folder/venv/bin/python" -W ignore -m torch.distributed.run --standalone \
        --nproc-per-node "$world" "$folder/draw.py" "$folder/$world.seen" 2>"$folder/log" || { cat "$folder/log"; exit 1; }
done
"$folder/venv/bin/python" - "$folder/2.seen" "$folder/4.seen" <<'PYTHON'
import sys
from pathlib import Path

raise SystemExit(not all(Path(name).read_text() == "1" for name in sys.argv[1:]))
PYTHON
