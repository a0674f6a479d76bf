"""The benchmark of torchtitan 0.3 runs its arms one after another, and names those that fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.torchtitan import runs
from tests.processes import PYTHONPATH

LLAMA = ("--flavor", "debugmodel", "--config", "llama3_debugmodel")
QWEN = ("--model", "qwen3", "--flavor", "debugmodel_moe", "--config", "qwen3_moe_debug")
SHORT = ("--tokens", "128", "--sequences", "2", "--skip", "1", "--steps", "1", "--no-compile")


@pytest.mark.long
@pytest.mark.skipif(runs.installed() != "0.3", reason=f"of torchtitan 0.3, here is {runs.installed()}")
@pytest.mark.parametrize(("model", "checkpoints"), [(LLAMA, "selective"), (QWEN, "full")])
def test_it_trains_on_cpus(tmp_path: Path, model: tuple[str, ...], checkpoints: str):
    figures = tmp_path / "figures.json"
    by = sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    ours = 'f8sub:{"emulate":true,"experts":true}'
    arms = "bf16", ours, 'f8sub:{"recipe_name":"none"}'
    options = *model, *SHORT, "--ac", checkpoints, "--json", str(figures)
    done = subprocess.run(
        [*by, "-m", "tests.scripts.titan_0_3_on_cpus", *options, *arms],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    bf16, f8sub, failed = (json.loads(line) for line in figures.read_text().splitlines())
    assert (bf16["arm"], f8sub["arm"]) == ("bf16", ours)
    assert f8sub["over_bf16"] == pytest.approx(bf16["step_ms"] / f8sub["step_ms"])
    assert bf16["tokens_per_second"] == pytest.approx(256e3 / bf16["step_ms"])
    assert 0 < abs(f8sub["loss"] - bf16["loss"]) < 0.05
    assert "none" in failed["error"]
