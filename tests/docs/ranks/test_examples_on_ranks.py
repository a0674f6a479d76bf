"""Every Python example of README.md and docs/ that needs ranks."""

import pytest

from tests.docs.pages import EXAMPLES, Example, run_on_rank

ON_RANKS = [example for example in EXAMPLES if example.world is not None]


def named(example: Example) -> str:
    return example.where


@pytest.mark.parametrize("example", ON_RANKS, ids=named)
def test_it_runs(example, ranks):
    if example.needs_gpu:
        pytest.skip("needs a CUDA device")
    ranks(example.world, run_on_rank, example)
