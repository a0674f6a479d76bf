"""What keeping x costs, as the scripts tell it: a byte an element, or none, and where nothing is reported."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize("recipe", ["tensorwise", "gridquant"])
def test_eager_code_keeps_a_byte_an_element_or_none(recipe):
    import keep_x_table

    found = {way: keep_x_table.in_eager_code(recipe, way) for way in keep_x_table.KEEP_X}
    scale = 4 / keep_x_table.SMALL**2
    assert found == {"auto": 0, "float8": 1 + scale, "high_precision": 0, "recompute": 1 + scale}


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["delayed", "gridquant"])
def test_compiled_code_saves_a_byte_an_element_less(recipe):
    pytest.importorskip("triton")
    import byte_lab
    import keep_x_table

    float8, kept = (keep_x_table.measured(recipe, way) for way in ("float8", "high_precision"))
    x = byte_lab.TOKENS * byte_lab.WIDTH
    assert float8.saved - kept.saved == pytest.approx(x, rel=1e-3)
    assert kept.moved > float8.moved


@pytest.mark.long
def test_the_account_of_a_llama():
    pytest.importorskip("triton")
    finished = subprocess.run(
        [sys.executable, str(SCRIPTS / "byte_account.py"), "--size", "debug", "--keep-x", "float8"],
        capture_output=True,
        text=True,
        timeout=600,
        env={"PYTHONPATH": str(SCRIPTS.parent), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    rows = [line for line in finished.stdout.splitlines() if line.startswith("model.layers.*.")]
    assert [row.split()[0].rpartition(".")[2] for row in rows] == [
        f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
    ]
    # Each of 4 layers of 768 x 256: float32, a byte, half of bf16's two.
    assert "x float8 3.15 0.786 / 0 0.786 / 1.57 8.39" in " ".join(rows[4].split())
