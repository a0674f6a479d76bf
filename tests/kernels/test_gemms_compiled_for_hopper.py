"""What the GEMM kernels compile to for sm_90a, by the script that prints it: no spills, float8 tensor cores, TMA."""

import importlib
from pathlib import Path

import pytest

from tests.kernels.interpreted import needs_triton
from tests.kernels.test_compiled_for_hopper import reported


def check(folder: Path, *arguments: str) -> list[dict]:
    found = reported(folder, *arguments, script="gemms.py")
    for row in found:
        assert row["missed"] == []
        assert row["spilled"] == row["undefined"] == 0
        assert row["products"] > 0
        assert (row["resized"] > 0) == row["persistent"]
    return found


@needs_triton
@pytest.mark.long
def test_those_of_blockwise_and_of_a_gradient_in_e5m2(tmp_path):
    """Of every tile and dtype; the script without arguments compiles the other pairs of formats too."""
    assert len(check(tmp_path, "--only", "1x128 x", "256x256 e5m2")) == 24


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
