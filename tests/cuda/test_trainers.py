"""The scripts of recipes/trainers on two GPUs: what tests/recipes/test_trainers.py shows on CPUs.

That file is imported by a test, not here: what it imports starts CUDA, after which no ranks can be forked.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tests.recipes.conftest  # noqa: F401  makes the scripts importable

NEEDED = ("accelerate", "lightning", "transformers")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
OPTIONS, TRAINERS = ["by-rank-0", "as-default", "full-state"], ["plain", "transformers", "lightning"]
"""As that file has them."""
pytestmark = [pytest.mark.own_ranks, pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(NEEDED)}")]


@pytest.fixture
def on_gpus(ranks) -> Callable[..., list[Any]]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return functools.partial(ranks, gpus=True, timeout=240)


@pytest.mark.parametrize("number", range(len(OPTIONS)), ids=OPTIONS)
def test_accelerate(on_gpus, tmp_path, number):
    from tests.recipes import test_trainers as on_cpus

    assert len(on_cpus.OPTIONS) == len(OPTIONS)
    on_cpus.check_accelerate(on_gpus, tmp_path, on_cpus.OPTIONS[number])


@pytest.mark.parametrize("name", TRAINERS)
def test_the_bits_of_a_plain_loop_and_a_checkpoint_of_plain_tensors(on_gpus, tmp_path, name):
    from tests.recipes import test_trainers as on_cpus

    assert [*on_cpus.TRAINERS] == TRAINERS
    on_cpus.check_trainer(on_gpus, tmp_path, name)
