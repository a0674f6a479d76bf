#!/usr/bin/env bash
# torch 2.13.0: destroy_process_group() does not end a gloo group whose ranks once added two DTensors.
#
# DTensor's cache of what its operators return holds the device mesh of the first call, and the mesh holds its group.
# destroy_process_group() only drops the registry's own reference, so the group's threads and its socket stay until the
# process ends, although the model and the mesh are gone. FSDP2 is built on DTensor; under DDP everything ends. A second
# job in the same process, as in a notebook or a test, has an equal mesh, so the cache hands it the first job's: results
# name a mesh that the job never made. Their collectives find the new group, because groups are numbered from 0 again.
#
# Expected: no thread of gloo after either job, and results on the mesh of their inputs. Seen: after DDP none, after
# FSDP2 3 threads and 1 socket; the second job's sum has the first job's mesh.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

cat >"$folder/seen.py" <<'PYTHON'
import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def held() -> tuple[int, int]:
    """Threads of gloo and open sockets of this process."""
    threads = [name for name in Path("/proc/self/task").glob("*/comm") if "gloo" in name.read_text()]
    sockets = 0
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder's own
            sockets += os.readlink(file).startswith("socket")
    return len(threads), sockets


@contextlib.contextmanager
def job() -> Iterator[None]:
    """One job from the start of its process group to the end."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    gc.collect()


def step(shard) -> None:
    """Train a layer once."""
    layer = shard(nn.Linear(8, 8))
    layer(torch.randn(2, 8)).square().sum().backward()


def is_on_its_own_mesh() -> bool:
    """Whether a sum of DTensors has the mesh of what was added."""
    mesh = init_device_mesh("cpu", (1,))
    x = DTensor.from_local(torch.randn(4, 4), mesh)
    return (x + x).device_mesh is mesh


print(f"torch {torch.__version__}, 1 rank")
found = {"before": held()}
for name, shard in (("DDP", nn.parallel.DistributedDataParallel), ("FSDP2", fully_shard)):
    with job():
        step(shard)
    found[name] = held()
with job():
    first = is_on_its_own_mesh()
with job():
    second = is_on_its_own_mesh()
for name, (threads, sockets) in found.items():
    print(f"{name}: {threads} threads of gloo, {sockets} sockets")
print(f"a sum is on the mesh of its inputs: {first} in a job, {second} in the next one of the process")
threads, sockets = found["before"]
as_seen = (
    threads == 0
    and found["DDP"] == found["before"]
    and found["FSDP2"] == (3, sockets + 1)
    and not second
)
raise SystemExit(not as_seen)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/seen.py"
