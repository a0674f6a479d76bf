"""A rank of recipes/pretrain.py is killed: the run goes on, on as many ranks and on half of them.

Three runs of the same six steps, with a checkpoint after every second: one that nothing happens to; one of which a rank
dies by SIGKILL in step 4, in the all-reduce of amaxes, and which torchrun starts again; and one that goes on from
step 4's checkpoint on half of the ranks, with as many sequences a step. The table has the largest difference of a loss
from the first run's. Restarted ranks do the same sums, so theirs are equal where the device's kernels add in one order.

    python scripts/bench/restart.py --gpus 8 --model.size 8b --training.seq_len 4096
    python scripts/bench/restart.py --gpus 2

Options that are not this script's are recipes/pretrain.py's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from scripts.bench import jobs
from scripts.bench.timing import machine
from scripts.table import ROOT, Table, parser, progress, write_json

STEPS, EVERY, RESUMED = 6, 2, 4
"""``tests/faults/ranks/killed_pretrain.py`` dies in step 4, so that step 2 is the last that was saved."""
TRAINER, MORTAL = ROOT / "recipes" / "pretrain.py", ROOT / "tests" / "faults" / "ranks" / "killed_pretrain.py"


def trained(
    arguments: argparse.Namespace, folder: Path, script: Path, ranks: int, sequences: int, *expected: str
) -> float:
    """Run a job to its end; the seconds that it took.

    Raises:
        RuntimeError: it failed, or did not say what is expected.
    """
    options = {
        "job.dump_folder": folder,
        "training.steps": STEPS,
        "training.local_batch_size": sequences,
        "checkpoint.interval": EVERY,
        "checkpoint.resume": "newest",
        "eval.interval": 0,
        "metrics.tensorboard": "false",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["--max-restarts=1", "--monitor-interval=0.1", str(script)]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "recipes"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    begin = time.monotonic()
    done = jobs.run([*command, *arguments.more], env={**env, "KILL_AT": "amax all-reduce"})
    said = done.stdout + done.stderr
    if done.returncode or not all(words in said for words in expected):
        told = "\n".join(said.splitlines()[-60:])
        raise RuntimeError(
            f"it ended with {done.returncode}; {expected} are expected in what it said: {told}"
        )
    return time.monotonic() - begin


def losses(folder: Path) -> dict[int, float]:
    """By step; of a step that was trained twice, the later one."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def figures(folder: Path, whole: dict[int, float], first: int, seconds: float) -> dict[str, Any]:
    """How far a run's losses from step ``first`` on are from the first run's."""
    found = losses(folder)
    gap = max(abs(found[step] / whole[step] - 1) for step in range(first, STEPS + 1))
    return {"gap_percent": 100 * gap, "equal": "bitwise" if gap == 0 else "", "seconds": seconds}


def main() -> None:
    made = parser(__doc__)
    made.add_argument(
        "--gpus", type=int, default=max(2, torch.cuda.device_count()), help="ranks, an even number"
    )
    made.add_argument("--sequences", type=int, default=2, help="a rank and step")
    arguments, arguments.more = made.parse_known_args()
    if arguments.gpus % 2:
        made.error("--gpus is an even number, half of which a run goes on with")
    ranks, sequences = arguments.gpus, arguments.sequences
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary, progress() as begin:
        first, killed, half = (Path(temporary) / name for name in ("first", "killed", "half"))
        begin("nothing happens")
        seconds = trained(arguments, first, TRAINER, ranks, sequences)
        whole = losses(first)
        found[f"{ranks} ranks, nothing happens"] = figures(first, whole, 1, seconds)
        begin("a rank dies")
        seconds = trained(arguments, killed, MORTAL, ranks, sequences, "(exitcode: -9)", "Resumed from")
        found[f"{ranks} ranks, one dies in step {RESUMED}"] = figures(killed, whole, 1, seconds)
        begin("half of the ranks go on")
        shutil.copytree(first, half)
        shutil.rmtree(half / "checkpoints" / f"step-{STEPS:08d}")
        seconds = trained(arguments, half, TRAINER, ranks // 2, 2 * sequences, "Resumed from")
        found[f"{ranks // 2} ranks go on after step {RESUMED}"] = figures(half, whole, RESUMED + 1, seconds)
    columns = (
        ("largest gap of a loss, %", "{gap_percent:.4f}"),
        ("", "{equal}"),
        ("seconds, all", "{seconds:.0f}"),
    )
    about = {**machine(device), "options": vars(arguments)}
    if arguments.json:
        write_json(arguments.json, {"about": about, "figures": found})
    Table.of(f"a rank is killed, {about['device']}", found.items(), columns).show()


if __name__ == "__main__":
    main()
