"""scripts/test.sh: what its last lines count, whatever a process prints after pytest's own last line."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LEAKS = """
nanobind: leaked 2 instances!
 - leaked instance 0x7f of type "triton.ir"
nanobind: leaked 12 types! 3 failed in no test of ours
nanobind: this is likely caused by a reference counting issue in the binding code."""
"""What Triton 3.9 prints when Python ends."""

ENDS = {
    "plain": ("5 passed in 3.21s", "7 passed, 1 skipped, 2 warnings in 213.71s (0:03:33)"),
    "failed": ("1 failed, 5 passed in 3.21s", "2 failed, 7 passed, 1 skipped, 1 error in 0.50s"),
    "days": ("12 passed, 3 deselected, 1 xfailed in 90061.00s (1 day, 1:01:01)", "no tests ran in 0.01s"),
}
COUNTED = {
    "plain": "12 passed, 0 failed, 1 skipped",
    "failed": "12 passed, 4 failed, 1 skipped",
    "days": "12 passed, 0 failed, 0 skipped",
}


def run(folder: Path, one: str, jobs: str, status: int) -> list[str]:
    """The output of test.sh with a pytest that prints what it is told, and ends with that status in lane "one"."""
    scripts, programs = folder / "scripts", folder / "venv" / "bin"
    for path in (scripts, programs, folder / "tests" / "weights" / "ranks"):
        path.mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "test.sh", scripts)
    for path, text in (
        (scripts / "setup_env.sh", "exit 0"),
        (
            programs / "python",
            f'if [ "$F8SUB_TEST_LANE" = one ]; then cat {folder}/one; exit {status}; fi; cat {folder}/jobs',
        ),
    ):
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
    (folder / "one").write_text(f"50 % tests\n{one}\n")
    (folder / "jobs").write_text(f"50 % tests\n{jobs}\n")
    made = subprocess.run(
        ["bash", str(scripts / "test.sh")],
        env={**os.environ, "VENV": str(folder / "venv")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == status, made.stderr
    return made.stdout.splitlines()


@pytest.mark.parametrize("after", ["", LEAKS], ids=["alone", "leaks"])
@pytest.mark.parametrize("case", ENDS)
def test_the_lines_counted_are_pytests_own(tmp_path, case, after):
    one, jobs = ENDS[case]
    lines = run(tmp_path, one + after, jobs + after, status=int(case == "failed"))
    assert lines[-3:] == [jobs, one, COUNTED[case]]


def test_a_lane_that_pytest_did_not_end_is_told(tmp_path):
    lines = run(tmp_path, "Fatal Python error: Segmentation fault", "5 passed in 3.21s", status=139)
    assert lines[-3:] == [
        "5 passed in 3.21s",
        "pytest did not come to its end in the lane one",
        "5 passed, 0 failed, 0 skipped",
    ]
