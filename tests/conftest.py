"""One thread a process, the nursery that gloo ranks are forked from, and what a run prints."""

import gc
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.interpreted import in_interpreter
from tests.lanes import Lane
from tests.ranks import Nursery, leave_guards_unmeasured, make_collections_rare
from tests.reporting import GPU_TESTS, Reporting, gpu_tests_left_out

torch.set_num_threads(1)
make_collections_rare()
leave_guards_unmeasured()
# Or the first from_pretrained() decides: findings/from_pretrained_leaves_linspace_on_the_cpu.sh.
with torch.device("meta"):
    torch.empty(0)
# To ask whether there are GPUs must not start CUDA: the ranks that do start it are forked from here.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

_nursery, _gpu_nursery = pytest.StashKey[Nursery](), pytest.StashKey[Nursery]()


@pytest.hookimpl(trylast=True)  # after pytest made the reporter
def pytest_configure(config: pytest.Config) -> None:
    lane = Lane(Path(taken)) if (taken := os.environ.pop("F8SUB_TEST_TAKEN", None)) is not None else None
    if lane is not None:
        config.pluginmanager.register(lane)
    if config.get_verbosity() < 0 and not config.option.collectonly:
        config.pluginmanager.register(Reporting(config, lane))
    if torch.cuda.device_count() and not config.option.collectonly:
        nursery = config.stash[_gpu_nursery] = Nursery.start()  # before any test is imported
        config.add_cleanup(nursery.stop)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests that need a GPU, where there is none; those named on the command line are collected and skipped."""
    if collection_path != GPU_TESTS or torch.cuda.device_count():
        return None
    if any(Path(argument).resolve() in GPU_TESTS.parents for argument in config.args):
        print(gpu_tests_left_out())
    return True


def pytest_collection_finish(session: pytest.Session) -> None:
    """Forks the nursery while every test module is imported and no test has run yet."""
    gc.freeze()  # collections, of which tests and f8sub ask for some, need not look at what lives on anyway
    if any("ranks" in getattr(item, "fixturenames", ()) for item in session.items):
        nursery = session.config.stash[_nursery] = Nursery.start()
        session.config.add_cleanup(nursery.stop)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """``ranks(world, body, *args)``: results of ``body(rank, world, *args)`` on gloo ranks, in order.

    With ``gpus=True``, on ranks with a GPU each.
    """
    file = None if request.node.get_closest_marker("own_ranks") is not None else request.node.location[0]

    def run(world: int, body: Callable[..., Any], *args: Any, gpus: bool = False, **how: Any) -> list[Any]:
        nursery = request.config.stash[_gpu_nursery if gpus else _nursery]
        return nursery.run(world, body, *args, gpus=gpus, **{"file": file, **how})

    return run


@pytest.fixture
def rank(ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """A test of ``(rank, world, ...)`` runs on ``world`` ranks and knows which one it is."""
    return ranks


@pytest.fixture
def world() -> int:
    """How many ranks; of other numbers a test is parametrized."""
    return 2


@pytest.fixture
def device() -> str:
    """Where a test of kernels runs, which tests/cuda calls with ``"cuda"``."""
    return "cpu"


@pytest.fixture
def interpreter() -> Callable[..., Any]:
    """``interpreter(function, *arguments)`` where Triton's kernels are interpreted."""
    return in_interpreter


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs on ranks what asks for its rank, and in the interpreter's process what is marked so."""
    given, test = pyfuncitem.funcargs, pyfuncitem.obj
    arguments = [given[name] for name in inspect.signature(test).parameters if name in given]
    if "rank" in given:
        run, world, *others = arguments
        run(world, test, *others)
    elif pyfuncitem.get_closest_marker("interpreted") is not None:
        in_interpreter(test, *arguments)
    else:
        return None
    return True


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing is compiled before a test nor after it, and nothing is counted."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
