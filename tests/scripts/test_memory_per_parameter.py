"""The bytes of every parameter, weights to optimizer states, as the script measures them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
EXPECTED = {
    "float32 weights": {"weights": 4, "masters": 0, "optimizer states": 8, "codes": 1},
    "bf16 weights, float32 masters": {"weights": 2, "masters": 4, "optimizer states": 8, "codes": 1},
    "float8 primary weights, float32 masters": {
        "weights": 0,
        "masters": 4,
        "optimizer states": 8,
        "codes": 1,
    },
    "frozen float8 primary weights": {"weights": 0, "masters": 0, "optimizer states": 0, "codes": 1},
}
SLACK = 0.02
"""Scales, step counts and the amax table, a few bytes a weight."""


@pytest.mark.long
def test_nothing_is_held_twice_and_primary_weights_are_one_byte(tmp_path):
    output = tmp_path / "memory.json"
    finished = subprocess.run(
        [sys.executable, str(SCRIPTS / "memory_per_parameter.py"), "--json", str(output)],
        capture_output=True,
        text=True,
        timeout=600,
        env={"PYTHONPATH": str(SCRIPTS.parent), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    print(finished.stdout)
    figures = json.loads(output.read_text())
    assert figures.keys() == {"1 rank", "2 ranks"}
    for rows in figures.values():
        assert rows.keys() == EXPECTED.keys()
        for name, expected in EXPECTED.items():
            for holder, count in {**expected, "other": 0, "total": sum(expected.values())}.items():
                assert rows[name][holder] == pytest.approx(count, abs=SLACK), (name, holder)
