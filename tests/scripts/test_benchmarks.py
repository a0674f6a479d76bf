"""The two cost claims, by the scripts that print them: CPU time against torchao in the same run."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"
LARGEST_PYTHON_COST = 0.40
LARGEST_PRECOMPUTE_COST = 0.50


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


def test_python_cost_of_a_call(tmp_path):
    figures = run("bench_python_cost.py", tmp_path)
    assert figures["ratio_to_torchao"] <= LARGEST_PYTHON_COST, figures
    assert figures["nn.Linear"]["median_us"] < figures["f8sub"]["median_us"], figures


def test_cpu_time_of_precompute_scales(tmp_path):
    figures = run("bench_precompute.py", tmp_path)
    assert figures["ratio_to_torchao"] <= LARGEST_PRECOMPUTE_COST, figures
