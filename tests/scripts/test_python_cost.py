"""The scripts that time Python run: against torchao in the same run."""

import pytest


@pytest.mark.long
@pytest.mark.parametrize("what", ["layer", "precompute"])
def test_it_tells_the_ratio_to_torchao(what, run_script):
    done = run_script("bench/python_cost.py", what, "--rounds", "3", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    assert 0 < done.figures["ratio_to_torchao"] < float("inf")
