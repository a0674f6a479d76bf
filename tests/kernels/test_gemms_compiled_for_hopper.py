"""What the GEMM kernels compile to for sm_90a, by the script that prints it: no spills, float8 tensor cores, TMA."""

from pathlib import Path

import pytest

from tests.kernels.interpreted import needs_triton
from tests.kernels.test_compiled_for_hopper import reported


def check(folder: Path, *arguments: str) -> list[dict]:
    found = reported(folder, *arguments, script="gemm_report.py")
    for row in found:
        assert row["missed"] == []
        assert row["spilled"] == row["undefined"] == 0
        assert row["products"] > 0
        assert (row["resized"] > 0) == row["persistent"]
    return found


@needs_triton
def test_the_persistent_ones_of_the_blockwise_recipe(tmp_path):
    tiles = "256x128, persistent, turns issued"
    only = [f"1x128 x 1x128 -> bf16, {tiles}", "1x128 x 128x128 -> fp32, 256x128"]
    assert len(check(tmp_path, "--only", *only)) == 2


@needs_triton
@pytest.mark.long
def test_every_one(tmp_path):
    assert len(check(tmp_path)) >= 40
