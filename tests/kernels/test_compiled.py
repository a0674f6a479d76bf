"""What the kernels compile to for sm_90a, by the scripts that print it: no spills, wide accesses, tensor cores."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.interpreted import needs_triton

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "kernels" / "compiled"


def printed(script: str, *arguments: str) -> str:
    """By a script that compiles kernels; it has to end with status 0."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    return finished.stdout


def reported(folder: Path, script: str, *arguments: str) -> list[dict]:
    print(printed(script, "--json", str(folder / "report.json"), *arguments))
    return json.loads((folder / "report.json").read_text())


@needs_triton
@pytest.mark.long
def test_every_kernel(tmp_path):
    found = reported(tmp_path, "kernels.py")
    assert len({row["kernel"] for row in found}) == 32
    for row in found:
        assert row["missed"] == []
        assert row["spilled"] == row["flushes"] == row["undefined"] == 0
        assert row["byte_loads"] == 0 or row["kernel"] == "quantize_group_exponents"
        # The second launch of amaxes is of matrices whose lines begin anywhere; a table of groups is small.
        narrow = row["kernel"] == "lay_out" or (row["kernel"], row["index"]) == ("amaxes_of_many", 1)
        assert row["wide_loads"] > 0 or narrow
        assert (row["transposed"] > 0) == row["transposes"]
        assert row["usages"] != "row" or not row["transposes"]


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("capability", ["89", "100", "120"])
def test_kernels_run_on_ada_and_blackwell(capability):
    """They compile, and their shared memory is no more than there is: those that use the most, and paired ones.

    Ada has no instruction for the maxima of pairs.
    """
    only = ("--only", "1x128 bf16", "tensorwise bf16", "256x256 fp32 both")
    said = printed("kernels.py", "--capability", capability, *only)
    assert said.endswith(f" kernels, all run on sm_{capability}\n")


@needs_triton
@pytest.mark.long
def test_a_miss_is_an_error(tmp_path):
    """A matrix whose rows begin at odd places cannot be read by 128 bits, and the report says so."""
    with pytest.raises(AssertionError, match="128-bit loads"):
        reported(tmp_path, "kernels.py", "--only", "128x128 bf16 row", "--shape", "8192", "4095")


@needs_triton
@pytest.mark.long
def test_gemms_of_blockwise_and_of_a_gradient_in_e5m2(tmp_path):
    """Of every tile and dtype; the script without arguments compiles the other pairs of formats too."""
    found = reported(tmp_path, "gemms.py", "--only", "1x128 x", "256x256 e5m2")
    assert len(found) == 24
    for row in found:
        assert row["missed"] == []
        assert row["spilled"] == row["undefined"] == 0
        assert row["products"] > 0
        assert (row["resized"] > 0) == row["persistent"]


@needs_triton
@pytest.mark.long
def test_products_by_groups(tmp_path):
    """Of the recipes' formats; the script without arguments compiles others too."""
    pairs = "rowwise", "tensorwise", "tensorwise e5m2", "1x128 x 128x128", "1x128 x 1x128"
    only = (
        f"{how} rows, {fast}{pair} -> bf16"
        for pair in pairs
        for how in ("by", "over")
        for fast in ("", "fast, ")
    )
    found = reported(tmp_path, "grouped.py", "--only", *only)
    assert len(found) == 76
    for row in found:
        assert row["missed"] == []
        assert row["spilled"] == row["undefined"] == 0
        assert row["products"] > 0
        assert (row["resized"] > 0) == row["persistent"]


@needs_triton
def test_products_that_wait_for_every_instruction_are_told():
    """Four instructions of a block as ptxas 12.8 writes them, and as it does after its warning C7514."""
    report = importlib.import_module("tests.kernels.compiled.gemms")
    first, later = (
        "QGMMA.64x64x32.F32.E4M3.E4M3 R88, gdesc[UR12], RZ, !UPT",
        "QGMMA.64x64x32.F32.E4M3.E4M3 R88, gdesc[UR24], R88",
    )
    wait = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    assert not report.is_serialized(f"{first} ;\n{later} ;\n{later} ;\n{later}, gsb0 ;\n{wait} ;")
    assert report.is_serialized(
        "".join(f"{line}, gsb0 ;\n{wait} ;\n" for line in (first, later, later, later))
    )
