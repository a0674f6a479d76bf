"""The GPU benchmark runs to its end where there is no GPU, says so, and times nothing that is wrong."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from f8sub.kernels import reference

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_from_end_to_end_on_the_cpu(tmp_path):
    output = tmp_path / "figures.json"
    options = ["--group", "quantize", "--rounds", "3", "--shapes", "48x160", "130x144", "--json", str(output)]
    finished = subprocess.run(
        [sys.executable, str(SCRIPTS / "bench_gpu.py"), *options],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS.parent), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "CPU, through the reference" in finished.stdout
    found = json.loads(output.read_text())
    assert found["before"]["device"] == "CPU"
    assert found["before"]["torch"] == torch.__version__
    assert list(found["figures"]) == ["48x160", "130x144"]
    for rows in found["figures"].values():
        assert {"copy", "1x128 both", "256x256 column", "transpose of codes"} <= set(rows)
        assert rows["copy"]["of_copy"] == 1.0
        for row in rows.values():
            assert row["median_ms"] > 0
            assert row["gb_per_s"] > 0


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    script = importlib.import_module("bench_gpu")
    format = script.FORMATS["tensorwise"]
    right = script._of(reference.quantize, (format, format))
    x = torch.randn(16, 32)
    script.check(script.Bench("right", right, right, 4.0), x)
    wrong = script.Bench("wrong", lambda x: right(x * 1.5), right, 4.0)
    with pytest.raises(RuntimeError, match="wrong of"):
        script.check(wrong, x)
