""".ci/run counts skips and fails on one that hides something that is not installed."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLOSING = "5 passed, 0 failed, 3 skipped"


def run(folder, output, status=0, lint_status=0, newest_status=0, environment=None):
    """``.ci/run`` over a test script that prints ``output`` and a lint script."""
    (folder / ".ci").mkdir()
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    (folder / "output").write_text(f"{output}\n{CLOSING}\n")
    newest = "#!/bin/sh\necho \"versions: $*\"\necho '2 passed, 0 failed, 1 skipped'\n"
    scripts = {
        "test_versions.sh": newest + f"exit {newest_status}\n",
        "lint.sh": f"#!/bin/sh\necho linted\nexit {lint_status}\n",
        "test.sh": f'#!/bin/sh\necho "arguments: $*"\ncat output\nexit {status}\n',
    }
    for name, text in scripts.items():
        (folder / "scripts" / name).write_text(text)
        (folder / "scripts" / name).chmod(0o755)
    return subprocess.run([str(folder / ".ci" / "run")], capture_output=True, text=True, env=environment)


def test_it_runs_everything_and_ends_with_the_closing_line(tmp_path):
    skips = "SKIPPED [2] tests/a.py:3: needs a CUDA device\nSKIPPED [1] tests/b.py:7: only on Windows"
    done = run(tmp_path, skips)
    assert done.returncode == 0
    assert done.stdout.startswith("linted\nversions: torch2.15\n")
    assert "arguments: --all\n" in done.stdout
    assert "slow" not in done.stdout
    assert "Skipped: 3 tests" in done.stdout
    assert "     2 needs a CUDA device" in done.stdout
    assert "     1 only on Windows" in done.stdout
    assert re.findall("versions: (.*)", done.stdout) == [
        "torch2.15",
        "triton3.6",
        "torch2.11 tests -k compil -m not long",
    ]
    assert done.stdout.splitlines()[-1] == "11 passed, 0 failed, 6 skipped"


def test_a_slow_machine_runs_the_default_suite_and_says_so(tmp_path):
    """bash's SECONDS counts on from what it is given."""
    done = run(tmp_path, "", environment={**os.environ, "SECONDS": "1600"})
    assert done.returncode == 0
    assert "arguments: \n" in done.stdout
    assert done.stdout.splitlines()[-2].startswith("This machine is slow: long tests")


@pytest.mark.parametrize(
    "reason",
    ["could not import 'torchao': No module named 'torchao'", "pyarrow is not installed", "curl missing"],
)
def test_a_skip_that_hides_a_missing_install_fails_it(tmp_path, reason):
    done = run(tmp_path, f"SKIPPED [1] tests/a.py:3: {reason}")
    assert done.returncode == 1
    assert f"These skips hide something that is not installed:\n1 {reason}" in done.stdout


@pytest.mark.parametrize("statuses", [{"status": 3}, {"lint_status": 2}, {"newest_status": 4}], ids=str)
def test_a_failing_test_run_fails_it_and_so_does_lint_after_the_tests(tmp_path, statuses):
    done = run(tmp_path, "", **statuses)
    assert [done.returncode] == list(statuses.values())
    assert "arguments: --all" in done.stdout
