"""The two cost claims, by the scripts that print them: CPU time against torchao in the same run."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"
LARGEST_PYTHON_COST = 0.40
LARGEST_PRECOMPUTE_COST = 0.50
RUNS = 3
"""What else the machine does moves a run's ratio by some per cent, so the claims are about the best of these."""


def run(script: str, folder: Path) -> dict:
    output = folder / "figures.json"
    finished = subprocess.run(
        [sys.executable, str(SCRIPTS / script), "--json", str(output)],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PYTHONPATH": str(SCRIPTS.parent), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    print(finished.stdout)
    return json.loads(output.read_text())


def best_ratio(script: str, folder: Path, enough: float) -> float:
    best = float("inf")
    for _ in range(RUNS):
        best = min(best, run(script, folder)["ratio_to_torchao"])
        if best <= enough:
            break
    return best


def test_python_cost_of_a_call(tmp_path):
    assert best_ratio("bench_python_cost.py", tmp_path, LARGEST_PYTHON_COST) <= LARGEST_PYTHON_COST


def test_cpu_time_of_precompute_scales(tmp_path):
    assert best_ratio("bench_precompute.py", tmp_path, LARGEST_PRECOMPUTE_COST) <= LARGEST_PRECOMPUTE_COST
