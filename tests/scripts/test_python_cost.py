"""The scripts that time Python run: against torchao in the same run, and launches."""

import pytest

from tests.kernels.interpreted import needs_triton


@pytest.mark.long
@pytest.mark.parametrize("what", ["layer", "precompute"])
def test_it_tells_the_ratio_to_torchao(what, run_script):
    done = run_script("bench/python_cost.py", what, "--rounds", "3", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    assert 0 < done.figures["ratio_to_torchao"] < float("inf")


@needs_triton
@pytest.mark.long
def test_replayed_steps_are_timed_by_part(run_script):
    few = "--layers", "2", "--rounds", "3", "--calls", "5"
    done = run_script("bench/python_cost.py", "replay", *few, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert list(done.figures) == ["bf16", "bf16+fused", "f8sub", "f8sub+fused"]
    for figures in done.figures.values():
        assert 0 < figures["compared_median_us"] < figures["call_median_us"]


@needs_triton
@pytest.mark.long
def test_launches_of_every_operator_are_timed(run_script):
    done = run_script("bench/launches.py", "--rounds", "2", "--calls", "3")
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("tensorwise", "rowwise", "blockwise", "gridquant"):
        assert f"{name}: quantize x, both usages" in done.stdout
    assert "multiply, blockwise" in done.stdout
    assert "attention, both, backward e4m3" in done.stdout


@pytest.mark.long
def test_guards_are_counted_and_timed(run_script):
    pytest.importorskip("torchao.float8")
    done = run_script("bench/guards.py", "--rounds", "2", "--calls", "3")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("nn.Linear", "torchao", "f8sub"))
