"""Every Python example of README.md and docs/: in a folder of its own, or on the ranks that it needs."""

import pytest
import torch

from tests.docs.pages import EXAMPLES, run, run_on_rank, skip_other_torchtitan

ALONE = [example for example in EXAMPLES if example.world is None]
ON_RANKS = [example for example in EXAMPLES if example.world is not None]


@pytest.mark.parametrize("example", ALONE, ids=lambda example: example.where)
def test_it_runs(example, tmp_path, monkeypatch):
    if example.needs_gpu and not torch.cuda.device_count():
        pytest.skip("needs a CUDA device")
    skip_other_torchtitan(example.source)
    monkeypatch.chdir(tmp_path)
    run(example)


@pytest.mark.parametrize("example", ON_RANKS, ids=lambda example: example.where)
def test_it_runs_on_ranks(example, ranks):
    if example.needs_gpu:
        pytest.skip("needs a CUDA device")
    skip_other_torchtitan(example.source)
    ranks(example.world, run_on_rank, example)
