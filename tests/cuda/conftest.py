"""Everything here needs a CUDA device with float8 tensor cores, and says so where there is none."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.torchtitan import runs
from tests.ranks import Nursery

HERE = Path(__file__).parent
OLDEST = (8, 9)

_titan = pytest.StashKey[Nursery]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cuda)
            # Every recipe is run on every GPU, those of other GPUs by the reference.
            item.add_marker(pytest.mark.filterwarnings("ignore:.*no native float8 GEMM"))
            if torch.cuda.device_count() == 0:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """A nursery of its own, warm with torchtitan, which takes seconds to import."""
    wanted = any("titan_on_gpus" in getattr(item, "fixturenames", ()) for item in session.items)
    if wanted and torch.cuda.device_count() and runs.installed() == "0.2":
        nursery = session.config.stash[_titan] = Nursery.start("torchtitan.train", "f8sub.titan")
        session.config.add_cleanup(nursery.stop)


@pytest.fixture(autouse=True)
def float8_tensor_cores() -> None:
    """Not asked at collection: the answer starts CUDA, which ranks cannot be forked after."""
    if torch.cuda.get_device_capability() < OLDEST:
        pytest.skip(f"needs a CUDA device of SM {OLDEST[0]}.{OLDEST[1]} or newer")


@pytest.fixture(scope="session")
def titan_on_gpus(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """``titan_on_gpus(world, body, *args)``: as ``ranks``, a GPU each, in processes that have torchtitan 0.2."""
    if _titan not in request.config.stash:
        pytest.skip(f"of torchtitan 0.2, here is {runs.installed()}")
    return functools.partial(request.config.stash[_titan].run, gpus=True, timeout=240.0)
