#!/usr/bin/env bash
# torch 2.13.0: a gloo process group that nobody uses has threads that run, and one of them wakes 100 times a second.
#
# A group is a list of ranks, and an idle one should cost nothing. Each gloo group has a transport device of its own,
# whose thread polls every 10 ms, and two more threads. Nothing is shared between groups of the same ranks. Meshes make a
# group per dimension and flattened dimension, loaders, checkpointers and samplers one each, and a default of
# "cpu:gloo,cuda:nccl" makes a gloo group for each of them. Groups that one drops without `destroy_process_group(group)`
# go on.
#
# Expected: an idle group costs no CPU time. Seen: with 64 groups 192 more threads, 5,800 wakes a second and 5 % of a
# core; the same after the last reference to the groups is gone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

cat >"$folder/seen.py" <<'PYTHON'
import gc
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

SECONDS = 5


def switches() -> dict[str, int]:
    """Times that each thread of this process went to sleep."""
    found = {}
    for status in Path("/proc/self/task").glob("*/status"):
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        found[status.parent.name] = int(lines["voluntary_ctxt_switches"])
    return found


def idle(what: str) -> tuple[int, float]:
    """Threads, and wakes a second of a process that sleeps."""
    time.sleep(0.5)
    before, used = switches(), time.process_time()
    time.sleep(SECONDS)
    after, used = switches(), time.process_time() - used
    wakes = sum(after[thread] - before.get(thread, 0) for thread in after) / SECONDS
    print(f"{what}: {len(after)} threads, {wakes:,.0f} wakes a second, {used / SECONDS:.1%} of a core")
    return len(after), wakes


print(f"torch {torch.__version__}, 1 rank")
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
threads, wakes = idle("the default group")
groups = [dist.new_group([0]) for _ in range(64)]
more_threads, more_wakes = idle("64 more that nobody uses")
del groups
gc.collect()
dropped_threads, dropped_wakes = idle("their handles dropped")
for group in [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
    dist.destroy_process_group(group)
del group
gc.collect()
ended_threads, ended_wakes = idle("destroyed")
expected = (
    more_threads - threads == 3 * 64
    and more_wakes - wakes > 64 * 80
    and dropped_threads == more_threads
    and dropped_wakes - wakes > 64 * 80
    and ended_wakes < wakes + 64 * 20
)
dist.destroy_process_group()
raise SystemExit(not expected)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/seen.py" "$folder/store"
