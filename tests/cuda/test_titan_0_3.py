"""torchtitan 0.3's trainer with f8sub on GPUs and NCCL, as it is by default: forward and backward are a CUDA graph.

Losses are bitwise those of the same run with ``--training.disable_cuda_graphs``.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda.test_titan import RECIPES
from tests.features.torchtitan import gloo
from tests.features.torchtitan.runs import last

COMMON = "debug.deterministic=true"
COMPILED = 'compile.enable=true compile.components=["model","loss"]'
CASES = [
    *((1, recipe, False, "") for recipe in ("tensorwise", "delayed")),
    *((2, recipe, gradients, "") for recipe in RECIPES for gradients in (False, True)),
    *((2, recipe, True, COMPILED) for recipe in ("tensorwise", "rowwise", "delayed")),
]
pytestmark = pytest.mark.usefixtures("titan_0_3_on_gpus")


def on(world: int, *values: Any) -> Any:
    """A parameter of tests, skipped where there are fewer GPUs."""
    few = pytest.mark.skipif(torch.cuda.device_count() < world, reason="needs two CUDA devices")
    return pytest.param(world, *values, marks=[few])


def config(**options: object) -> str:
    return f"f8sub:{json.dumps({'emulate': False, **options}, separators=(',', ':'))}"


@pytest.fixture(scope="session")
def assets(titan_0_3_on_gpus: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("titan")
    titan_0_3_on_gpus(1, gloo.make_assets, folder)
    return folder


@pytest.fixture(scope="session")
def train(titan_0_3_on_gpus: Callable[..., list[Any]], assets: Path) -> Callable[..., dict[str, Any]]:
    """``train(world, arguments, graphs)``: what the body ``train`` returns; the same run is made once."""
    from tests.cuda import titan_0_3

    @functools.cache
    def run(world: int, arguments: str, graphs: bool) -> dict[str, Any]:
        disabled = f"training.disable_cuda_graphs={str(not graphs).lower()}"
        words = f"{arguments} {COMMON} {disabled}".split()
        return titan_0_3_on_gpus(world, titan_0_3.train, words, assets)[0]

    return run


@pytest.mark.parametrize(("world", "recipe", "gradients", "how"), [on(*case) for case in CASES])
def test_losses_are_those_of_launched_steps(train, world, recipe, gradients, how):
    job = f"{config(recipe_name=recipe, reduce_gradients_in_float8=gradients)} {how}"
    launched, graphed = (train(world, job, graphs) for graphs in (False, True))
    assert (launched["captured"], graphed["captured"]) == ([], [True])
    assert graphed["losses"] == launched["losses"]
    bf16 = train(world, f"bf16 {how}", True)
    assert last(graphed["losses"]) != last(bf16["losses"])
    assert abs(last(graphed["losses"]) - last(bf16["losses"])) < 4e-3


@pytest.mark.parametrize(("world", "how"), [on(1, ""), on(2, ""), on(2, COMPILED)])
def test_a_monitor_samples_steps_that_are_launched(train, tmp_path, world, how):
    file, more = tmp_path / "numerics.jsonl", {"reduce_gradients_in_float8": True}
    job = f"{config(monitor_every=3, monitor_file=str(file), **more)} {how} training.steps=8"
    plain, watched = train(world, f"{config(**more)} {how} training.steps=8", True), train(world, job, True)
    assert watched["captured"] == [True]
    if not how:  # sampled steps of compiled blocks run eagerly
        assert watched["losses"] == plain["losses"]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    measured = ("x", "w", "dy", "gradient") if world > 1 else ("x", "w", "dy")
    assert {(row["step"], row["role"]) for row in rows} == {(s, r) for s in (1, 4, 7) for r in measured}
