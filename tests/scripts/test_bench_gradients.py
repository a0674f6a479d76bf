"""The benchmark of gradients' reductions runs to its end where there is no GPU."""

import pytest

pytestmark = pytest.mark.long


def test_every_group_has_figures(run_script):
    finished = run_script("bench/gradients.py")
    assert finished.returncode == 0, finished.stderr[-3000:]
    found = finished.figures["figures"]
    layers = found["layers tiny layer"]
    assert layers["float8"]["db"] > 30
    assert set(found["step"]) == {"float32", "bfloat16", "float8", "float32 again"}
    assert found["step"]["float32"]["loss"] == found["step"]["float32 again"]["loss"]
    for world in (2, 8, 64):
        assert set(found[f"pack tiny layer, {world} ranks"]) >= {"chunk_cat to torch.bfloat16", "copy"}
