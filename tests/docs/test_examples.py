"""Every Python example of README.md and docs/ that one process can run, in a folder of its own."""

import pytest
import torch

from tests.docs.pages import EXAMPLES, run

ALONE = [example for example in EXAMPLES if example.world is None]


@pytest.mark.parametrize("example", ALONE, ids=lambda example: example.where)
def test_it_runs(example, tmp_path, monkeypatch):
    if example.needs_gpu and not torch.cuda.device_count():
        pytest.skip("needs a CUDA device")
    monkeypatch.chdir(tmp_path)
    run(example)
