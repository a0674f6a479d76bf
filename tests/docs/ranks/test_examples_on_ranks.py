"""Every Python example of README.md and docs/ that needs ranks."""

import pytest

from tests.docs.pages import EXAMPLES, run_on_rank

ON_RANKS = [example for example in EXAMPLES if example.world is not None]


@pytest.mark.parametrize("example", ON_RANKS, ids=lambda example: example.where)
def test_it_runs(example, ranks):
    if example.needs_gpu:
        pytest.skip("needs a CUDA device")
    ranks(example.world, run_on_rank, example)
