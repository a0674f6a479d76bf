""".ci/run counts skips and fails on one that hides something that is not installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLOSING = "============ 5 passed, 3 skipped in 12.34s ============"


def run(folder, output, status=0):
    """``.ci/run`` over a test script that prints ``output``."""
    (folder / ".ci").mkdir()
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    (folder / "output").write_text(f"{output}\n{CLOSING}\n")
    script = folder / "scripts" / "test.sh"
    script.write_text(f'#!/bin/sh\necho "arguments: $*"\ncat output\nexit {status}\n')
    script.chmod(0o755)
    return subprocess.run([str(folder / ".ci" / "run")], capture_output=True, text=True)


def test_it_runs_everything_and_ends_with_the_closing_line(tmp_path):
    done = run(
        tmp_path, "SKIPPED [2] tests/a.py:3: needs a CUDA device\nSKIPPED [1] tests/b.py:7: only on Windows"
    )
    assert done.returncode == 0
    assert "arguments: --all" in done.stdout
    assert "Skipped: 3 tests" in done.stdout
    assert "     2 needs a CUDA device" in done.stdout
    assert "     1 only on Windows" in done.stdout
    assert done.stdout.splitlines()[-1] == CLOSING


@pytest.mark.parametrize(
    "reason",
    ["could not import 'torchao': No module named 'torchao'", "pyarrow is not installed", "curl missing"],
)
def test_a_skip_that_hides_a_missing_install_fails_it(tmp_path, reason):
    done = run(tmp_path, f"SKIPPED [1] tests/a.py:3: {reason}")
    assert done.returncode == 1
    assert f"These skips hide something that is not installed:\n1 {reason}" in done.stdout


def test_a_failing_test_run_fails_it(tmp_path):
    assert run(tmp_path, "", status=3).returncode == 3
