"""A nursery of its own, warm with torchtitan: that takes 20 seconds to import and changes torch where it is."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.torchtitan import gloo, runs
from tests.ranks import Nursery

_nursery = pytest.StashKey[Nursery]()


def pytest_collection_finish(session: pytest.Session) -> None:
    wanted = any("any_titan" in getattr(item, "fixturenames", ()) for item in session.items)
    if wanted and runs.installed() in runs.CPU:
        nursery = session.config.stash[_nursery] = Nursery.start(runs.CPU[runs.installed()])
        session.config.add_cleanup(nursery.stop)


@pytest.fixture(scope="session")
def any_titan(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """As ``ranks``, in processes that have torchtitan; all its tests use the same, one after another."""
    if _nursery not in request.config.stash:
        pytest.skip(f"torchtitan is not installed in one of the versions {', '.join(runs.CPU)}")
    return functools.partial(request.config.stash[_nursery].run, file="tests/integrations/torchtitan")


@pytest.fixture(scope="session")
def titan(any_titan: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Of version 0.3."""
    return _of_version("0.3", any_titan)


@pytest.fixture(scope="session")
def titan_0_2(any_titan: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Of version 0.2, each test in new processes: what parses a job there changes the job's class."""
    return functools.partial(_of_version("0.2", any_titan), file=None)


def _of_version(version: str, ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    if runs.installed() != version:
        pytest.skip(
            f"of titan {version}, here is {runs.installed()}: scripts/test_versions.sh has a row of each"
        )
    return ranks


@pytest.fixture(scope="session")
def assets(any_titan: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and a data set."""
    folder = tmp_path_factory.mktemp("titan")
    any_titan(1, gloo.make_assets, folder)
    return folder


@pytest.fixture(scope="session")
def train(any_titan: Callable[..., list[Any]], assets: Path) -> Callable[..., Any]:
    """``train(world, "bf16 section.field=value ...")``: losses by step; the same run is made once.

    Of the last rank, which has the end of a pipeline.
    """

    @functools.cache
    def run(world: int, arguments: str) -> dict[int, float]:
        return any_titan(world, runs.train, arguments.split(), assets)[-1]["losses"]

    return run
