"""The scripts of the two cost claims run: CPU time against torchao in the same run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(script: str, *options: str, folder: Path) -> dict:
    output = folder / "figures.json"
    finished = subprocess.run(
        [sys.executable, str(SCRIPTS / script), *options, "--json", str(output)],
        capture_output=True,
        text=True,
        timeout=600,
        env={"PYTHONPATH": str(SCRIPTS.parent), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    print(finished.stdout)
    return json.loads(output.read_text())


@pytest.mark.long
@pytest.mark.parametrize("script", ["bench_python_cost.py", "bench_precompute.py"])
def test_it_tells_the_ratio_to_torchao(script, tmp_path):
    assert 0 < run(script, "--rounds", "3", folder=tmp_path)["ratio_to_torchao"] < float("inf")
