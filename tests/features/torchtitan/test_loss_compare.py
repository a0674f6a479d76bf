"""The convergence protocol of recipes/torchtitan in small: torchtitan's runs of two arms and seeds, compared."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.features.torchtitan import runs

SCRIPT = Path(__file__).parents[3] / "scripts" / "loss_compare.py"


@pytest.mark.long
@pytest.mark.usefixtures("titan")
def test_what_torchtitan_logs_is_compared(titan, assets, tmp_path):
    command = [
        sys.executable,
        str(SCRIPT),
        "--folder",
        str(tmp_path),
        "--json",
        str(tmp_path / "figures.json"),
    ]
    logged: dict[str, list[dict[int, float]]] = {}
    for arm, config in (("bf16", "bf16"), ("float8", "f8sub")):
        names = [f"convergence_{arm}_seed{seed}" for seed in (0, 1)]
        logged[arm] = [
            titan(
                1,
                runs.train,
                [
                    *(config, f"debug.seed={seed}", "training.seq_len=64", "metrics.enable_tensorboard=true"),
                    *("metrics.log_freq=1", f'metrics.save_tb_folder="{name}"'),
                ],
                assets,
            )[0]["losses"]
            for seed, name in enumerate(names)
        ]
        command += ["--recorded", arm, *(str(assets / name) for name in names)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    for arm, losses in logged.items():
        assert figures["train_losses"][arm] == [pytest.approx(list(run.values()), rel=1e-6) for run in losses]
    assert figures["logged"] == [1, 2, 3, 4, 5]
    assert 0 < abs(figures["gaps"]["float8"]["gap_percent"]) < 0.05
    assert figures["gaps"]["float8"]["half_width_percent"] is not None
