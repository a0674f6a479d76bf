"""The launchers on two hosts, at debug size. Slurm's own commands are played: srun starts the command on every host."""

import subprocess
from pathlib import Path

import pytest

from tests.namespaces import MULTIHOST, ROOT, environment, needs_hosts
from tests.recipes.runs import QUICK, losses, quick_settings, records, train

LAUNCHERS = ROOT / "recipes" / "launch"
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames host[0-1]" ] && printf 'host0\\nhost1\\n'
"""
SRUN = f"""#!/bin/sh
[ "$1" = --kill-on-bad-exit=1 ] && shift && exec {MULTIHOST} --hosts "$SLURM_JOB_NUM_NODES" "$@"
"""


def launched(folder: Path, *command: str | Path, **variables: str) -> str:
    """What a run of ``pretrain.py`` in ``folder`` wrote."""
    options = [*QUICK.split(), "--job.dump_folder", folder, "--metrics.log_interval", "1"]
    done = subprocess.run(
        [*command, "recipes/pretrain.py", *options],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(**variables),
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def expected(ranks, tmp_path):
    """The losses of two ranks on one host."""
    settings = quick_settings(tmp_path / "one host")
    assert ranks(2, train, settings) == [True, True]
    return losses(settings)


@needs_hosts
@pytest.mark.long
def test_torchrun_on_two_hosts_trains_as_two_ranks_of_one(tmp_path, expected):
    output = launched(tmp_path / "run", MULTIHOST, "--hosts", "2", LAUNCHERS / "torchrun.sh")
    assert "2 ranks on cpu" in output
    settings = quick_settings(tmp_path / "run")
    assert losses(settings) == expected
    assert [record["amax_all_reduces"] for record in records(settings)] == [1] * len(expected)


@needs_hosts
def test_slurm_starts_torchrun_on_every_node_of_the_job(tmp_path, expected):
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    output = launched(
        tmp_path / "run",
        LAUNCHERS / "slurm.sh",
        PATH=f"{commands}:{environment()['PATH']}",
        NPROC_PER_NODE="1",
        SLURM_SUBMIT_DIR=str(ROOT),
        SLURM_JOB_ID="4711",
        SLURM_JOB_NUM_NODES="2",
        SLURM_JOB_NODELIST="host[0-1]",
    )
    assert "2 ranks on cpu" in output
    assert losses(quick_settings(tmp_path / "run")) == expected


def test_outside_of_slurm_its_launcher_says_so():
    done = subprocess.run(
        [LAUNCHERS / "slurm.sh", "recipes/pretrain.py"], capture_output=True, text=True, env=environment()
    )
    assert done.returncode != 0
    assert "submit this script with sbatch" in done.stderr


def test_torchrun_needs_a_program():
    done = subprocess.run([LAUNCHERS / "torchrun.sh"], capture_output=True, text=True, env=environment())
    assert done.returncode == 2
    assert "no program to run; for example recipes/pretrain.py" in done.stderr
