"""What the Triton kernels compile to for sm_90a, by the script that prints it: neither spills nor narrow accesses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.interpreted import needs_triton

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "kernels" / "compiled"


def reported(folder: Path, *arguments: str, script: str = "kernels.py") -> list[dict]:
    """What a script that compiles kernels writes of them; it has to end with status 0."""
    output = folder / "report.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    finished = subprocess.run(
        [sys.executable, str(SCRIPTS / script), "--json", str(output), *arguments],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    print(finished.stdout)
    return json.loads(output.read_text())


def check(found: list[dict]) -> None:
    assert found
    for row in found:
        assert row["missed"] == []
        assert row["spilled"] == row["byte_loads"] == row["flushes"] == row["undefined"] == 0
        # The second launch of amaxes is of matrices whose lines begin anywhere.
        assert row["wide_loads"] > 0 or (row["kernel"], row["index"]) == ("amaxes_of_many", 1)
        assert (row["transposed"] > 0) == row["transposes"]
        assert row["usages"] != "row" or not row["transposes"]


@needs_triton
@pytest.mark.long
def test_every_kernel(tmp_path):
    found = reported(tmp_path)
    assert len({row["kernel"] for row in found}) == 18
    check(found)


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("capability", ["89", "100", "120"])
def test_kernels_run_on_ada_and_blackwell(capability):
    """They compile, and their shared memory is no more than there is: those that use the most, and paired ones.

    Ada has no instruction for the maxima of pairs.
    """
    command = [sys.executable, str(SCRIPTS / "kernels.py"), "--capability", capability]
    command += ["--only", "1x128 bf16", "tensorwise bf16", "256x256 fp32 both"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    finished = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    assert finished.stdout.endswith(f" kernels, all run on sm_{capability}\n")


@needs_triton
@pytest.mark.long
def test_a_miss_is_an_error(tmp_path):
    """A matrix whose rows begin at odd places cannot be read by 128 bits, and the report says so."""
    with pytest.raises(AssertionError, match="128-bit loads"):
        reported(tmp_path, "--only", "128x128 bf16 row", "--shape", "8192", "4095")
