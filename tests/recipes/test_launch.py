"""The launchers on two hosts, at debug size. Slurm's own commands are played: srun starts the command on every host."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.namespaces import MULTIHOST, ROOT, environment, needs_hosts, processes_on, start
from tests.recipes.runs import QUICK, losses, quick_settings, records, train_as_launched

LAUNCHERS = ROOT / "recipes" / "launch"
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames host[0-1]" ] && printf 'host0\\nhost1\\n'
"""
SRUN = f"""#!/bin/sh
[ "$1" = --kill-on-bad-exit=1 ] && shift && exec {MULTIHOST} --hosts "$SLURM_JOB_NUM_NODES" "$@"
"""


def job(folder: Path, options: str = "") -> list[str | Path]:
    """``pretrain.py`` in ``folder``, as ``quick_settings`` have it."""
    own = ["--job.dump_folder", folder, "--metrics.log_interval", "1"]
    return ["recipes/pretrain.py", *QUICK.split(), *options.split(), *own]


@pytest.fixture
def expected(ranks, tmp_path):
    """The losses of two ranks on one host, by options."""

    def train_here(options: str = "") -> list[float]:
        settings = quick_settings(tmp_path / "one host", options)
        assert ranks(2, train_as_launched, settings) == [True, True]
        return losses(settings)

    return train_here


@needs_hosts
@pytest.mark.long
def test_a_rank_killed_on_one_host_is_started_again_with_those_of_the_other(tmp_path, expected):
    folder, options = tmp_path / "run", "--training.steps 10"
    saving = f"{options} --checkpoint.interval 2 --checkpoint.resume newest"
    run = start("--hosts", "2", LAUNCHERS / "torchrun.sh", *job(folder, saving), MAX_RESTARTS="1")
    try:
        second = folder / "checkpoints" / "step-00000004"  # the one before is whole
        deadline = time.monotonic() + 600
        while not second.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        (killed,) = [pid for pid, line in processes_on(1, run).items() if line[1:3] == ["-u", job(folder)[0]]]
        os.kill(killed, signal.SIGKILL)
        output, errors = run.communicate(timeout=600)
    finally:
        run.terminate()
        run.wait(timeout=600)
    assert run.returncode == 0, output + errors
    assert "Resumed from" in output
    assert losses(quick_settings(folder)) == expected(options)


@needs_hosts
@pytest.mark.long
def test_slurm_starts_torchrun_on_every_node_of_the_job(tmp_path, expected):
    """By ``torchrun.sh``, and two hosts train as two ranks of one."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    variables = environment(
        PATH=f"{commands}:{environment()['PATH']}",
        NPROC_PER_NODE="1",
        SLURM_SUBMIT_DIR=str(ROOT),
        SLURM_JOB_ID="4711",
        SLURM_JOB_NUM_NODES="2",
        SLURM_JOB_NODELIST="host[0-1]",
    )
    command = [LAUNCHERS / "slurm.sh", *job(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=variables, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks on cpu" in done.stdout
    settings = quick_settings(tmp_path / "run")
    assert losses(settings) == expected()
    assert [record["amax_all_reduces"] for record in records(settings)] == [1] * settings.training.steps
