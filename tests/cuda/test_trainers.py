"""The scripts of recipes/trainers on two GPUs: what tests/recipes/test_trainers.py shows on CPUs."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tests.recipes.conftest  # noqa: F401  makes the scripts importable

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
from tests.recipes import test_trainers as on_cpus

pytestmark = pytest.mark.own_ranks


@pytest.fixture
def on_gpus(ranks) -> Callable[..., list[Any]]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return functools.partial(ranks, gpus=True, timeout=240)


@pytest.mark.parametrize("options", on_cpus.OPTIONS, ids=["by-rank-0", "as-default", "full-state"])
def test_accelerate(on_gpus, tmp_path, options):
    on_cpus.check_accelerate(on_gpus, tmp_path, options)


@pytest.mark.parametrize("name", on_cpus.TRAINERS)
def test_the_bits_of_a_plain_loop_and_a_checkpoint_of_plain_tensors(on_gpus, tmp_path, name):
    on_cpus.check_trainer(on_gpus, tmp_path, name)
