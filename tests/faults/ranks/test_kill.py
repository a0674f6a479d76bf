"""A rank that dies anywhere: torchrun starts all of them again, and the losses are the uninterrupted run's, bitwise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.runs import QUICK, losses, quick_settings, train_as_launched
from tests.recipes.test_pretrain_end_to_end import ROOT, environment

SCRIPT = Path(__file__).with_name("killed_pretrain.py")
OPTIONS = "--float8.recipe tensorwise --training.steps 6 --checkpoint.interval 2 --checkpoint.resume newest"
POINTS = ("amax all-reduce", "async save")


def torchrun(folder: Path, kill_at: str) -> subprocess.CompletedProcess:
    """Two ranks, of which one dies once; both are started once more."""
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1"
    launch += " --monitor-interval 0.1"
    mode = "async" if "async" in kill_at else "disabled"
    options = f"{QUICK} {OPTIONS} --checkpoint.async_mode {mode}".replace("--training.steps 4 ", "")
    return subprocess.run(
        [sys.executable, *launch.split(), str(SCRIPT), "--job.dump_folder", str(folder), *options.split()],
        env=environment(
            KILL_AT=kill_at,
            PYTHONPATH=os.pathsep.join(map(str, (ROOT, ROOT / "recipes"))),
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        ),
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return tmp_path_factory.mktemp("uninterrupted")


@pytest.mark.long
@pytest.mark.parametrize("kill_at", POINTS)
def test_the_run_goes_on_from_the_last_whole_checkpoint(ranks, uninterrupted, tmp_path, kill_at):
    expected = quick_settings(uninterrupted, OPTIONS)
    if not (uninterrupted / "metrics.jsonl").exists():
        ranks(2, train_as_launched, expected)
    done = torchrun(tmp_path, kill_at)
    assert done.returncode == 0, done.stderr[-5000:]
    # The agent names the rank that it sees die first: the one that was killed, or the other, whose connection closed.
    assert re.search(r"exitcode *: -(9|6)\b", done.stderr), done.stderr[-3000:]
    assert f"Resumed from {tmp_path}/checkpoints/step-00000002" in done.stdout
    cut_short = "Checkpoint step-00000004 is refused: it has no manifest.json, so saving it was cut short."
    assert (cut_short in done.stdout) == ("save" in kill_at)
    assert losses(quick_settings(tmp_path)) == losses(expected)
    assert len(losses(expected)) == 6
    for rank in (0, 1):
        file = f"checkpoints/step-00000006/__{rank}_0.distcp"
        assert (tmp_path / file).read_bytes() == (uninterrupted / file).read_bytes()
