"""torchtitan 0.3's trainer with f8sub on GPUs and NCCL, as it is by default: forward and backward are a CUDA graph.

Losses are bitwise those of the same run with ``--training.disable_cuda_graphs``.
"""

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda.test_titan import RECIPES
from tests.integrations.torchtitan import gloo
from tests.integrations.torchtitan.runs import installed

COMMON = "debug.deterministic=true"
COMPILED = 'compile.enable=true compile.components=["model","loss"]'
CASES = [
    *((1, recipe, False, "") for recipe in ("tensorwise", "delayed")),
    *((2, recipe, gradients, "") for recipe in RECIPES for gradients in (False, True)),
    *((2, recipe, True, COMPILED) for recipe in ("tensorwise", "rowwise", "delayed")),
]
WATCHED = [(1, ""), (2, ""), (2, COMPILED)]
GRADIENTS = {"reduce_gradients_in_float8": True}
pytestmark = pytest.mark.skipif(installed() != "0.3", reason=f"of torchtitan 0.3, here is {installed()}")


def on(world: int, *values: Any) -> Any:
    """A parameter of tests, skipped where there are fewer GPUs."""
    few = pytest.mark.skipif(torch.cuda.device_count() < world, reason="needs two CUDA devices")
    return pytest.param(world, *values, marks=[few])


def job(arm: str, how: str, graphs: bool) -> str:
    return f"{arm} {how} {COMMON} training.disable_cuda_graphs={str(not graphs).lower()}"


def f8sub(**options: object) -> str:
    return f"f8sub:{json.dumps({'emulate': False, **options}, separators=(',', ':'))}"


def compared(recipe: str, gradients: bool, how: str) -> list[str]:
    """The jobs launched and as a graph, and bf16's."""
    arm = f8sub(recipe_name=recipe, reduce_gradients_in_float8=gradients)
    return [job(arm, how, False), job(arm, how, True), job("bf16", how, True)]


def watched(world: int, how: str) -> list[str]:
    """Jobs as graphs without and with a monitor, whose file is in the working directory."""
    file, more = f"{world}-{'compiled' if how else 'eager'}.jsonl", f"{how} training.steps=8"
    plain = job(f8sub(**GRADIENTS), more, True)
    return [plain, job(f8sub(monitor_every=3, monitor_file=file, **GRADIENTS), more, True)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer and a data set; the working directory of the jobs."""
    made = tmp_path_factory.mktemp("titan")
    gloo.make_assets(0, 1, made)
    return made


@pytest.fixture(scope="session")
def train(folder: Path) -> Callable[[int, str], dict[str, Any]]:
    """What ``titan_0_3.train`` returns of a job. All jobs of so many ranks are trained by one torchrun, in turn."""

    @functools.cache
    def of_world(world: int) -> dict[str, Any]:
        jobs = [each for n, *case in CASES if n == world for each in compared(*case)]
        jobs += [each for n, how in WATCHED if n == world for each in watched(n, how)]
        (folder / "jobs.json").write_text(json.dumps(list(dict.fromkeys(jobs))))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        command += ["-m", "tests.cuda.titan_0_3", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
        if done.returncode:
            pytest.fail(f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}", pytrace=False)
        return json.loads((folder / "found.json").read_text())

    return lambda world, job: of_world(world)[job]


@pytest.mark.parametrize(("world", "recipe", "gradients", "how"), [on(*case) for case in CASES])
def test_losses_are_those_of_launched_steps(train, world, recipe, gradients, how):
    launched, graphed, bf16 = (train(world, each) for each in compared(recipe, gradients, how))
    assert (launched["captured"], graphed["captured"]) == ([], [True])
    assert graphed["losses"] == launched["losses"]
    assert 0 < abs(graphed["losses"][-1] - bf16["losses"][-1]) < 4e-3


@pytest.mark.parametrize(("world", "how"), [on(*case) for case in WATCHED])
def test_a_monitor_samples_steps_that_are_launched(train, folder, world, how):
    plain, seen = (train(world, each) for each in watched(world, how))
    assert seen["captured"] == [True]
    if not how:  # sampled steps of compiled blocks run eagerly
        assert seen["losses"] == plain["losses"]
    file = folder / f"{world}-{'compiled' if how else 'eager'}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    measured = ("x", "w", "dy", "gradient") if world > 1 else ("x", "w", "dy")
    assert {(row["step"], row["role"]) for row in rows} == {(s, r) for s in (1, 4, 7) for r in measured}
