"""One thread a process, and the nursery that gloo ranks are forked from."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.dist.ranks import Nursery

torch.set_num_threads(1)
# To ask whether there are GPUs must not start CUDA: the ranks that do start it are forked from here.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

_nursery = pytest.StashKey[Nursery]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Forks the nursery while every test module is imported and no test has run yet."""
    if any("ranks" in getattr(item, "fixturenames", ()) for item in session.items):
        session.config.stash[_nursery] = Nursery.start()


def pytest_unconfigure(config: pytest.Config) -> None:
    nursery = config.stash.get(_nursery, None)
    if nursery is not None:
        nursery.stop()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """``ranks(world, body, *args)``: results of ``body(rank, world, *args)`` on gloo ranks, in order."""
    return request.config.stash[_nursery].run
