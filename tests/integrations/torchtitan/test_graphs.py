"""The order of calls that torchtitan 0.3 has by default: forward and backward are a graph from the second step on."""

import json
from itertools import product

import pytest

import f8sub
from tests.integrations.torchtitan import runs
from tests.ranks import RankFailure
from tests.selection import long_but

pytestmark = [
    pytest.mark.usefixtures("any_titan"),
    pytest.mark.skipif(
        runs.installed() == "0.2",
        reason="of torchtitan 0.3, here is 0.2: scripts/test_versions.sh has a row of each",
    ),
]

COMPILED = 'compile.enable=true compile.backend="aot_eager"'


def config(**options: object) -> str:
    return f"f8sub:{json.dumps(options, separators=(',', ':'))}"


def graphed(titan, assets, world: int, arguments: str, usual: str | None = None) -> dict[str, object]:
    return titan(world, runs.train_graphed, arguments.split(), assets, usual and usual.split())[-1]


@pytest.mark.parametrize(
    ("recipe", "gradients"),
    long_but([("tensorwise", True)], [("tensorwise", False), *product(f8sub.recipe_names(), [True])]),
)
def test_losses_are_those_of_launched_steps(titan, train, assets, recipe, gradients):
    job = config(recipe_name=recipe, reduce_gradients_in_float8=gradients)
    found = graphed(titan, assets, 2, job)
    assert found["kinds"] == kinds(recipe)
    assert found["losses"] == train(2, job)


def kinds(recipe: str) -> list[str]:
    """Those of five steps: compiled blocks with amax histories are compiled once more for the second."""
    launched = 1 if f8sub.get_recipe(recipe).delayed is None else 2
    return ["launched"] * launched + ["captured"] + ["replayed"] * (4 - launched)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise", "nvfp4"])
def test_nothing_is_compiled_in_a_capture(titan, assets, recipe):
    job = f"{config(recipe_name=recipe, reduce_gradients_in_float8=False)} {COMPILED}"
    found = graphed(titan, assets, 2, job, usual=job)
    assert found["kinds"] == kinds(recipe)
    assert found["losses"] == found["launched"]


@pytest.mark.long
@pytest.mark.parametrize("world", long_but((2,), (1, 2)))
def test_a_monitor_samples_steps_that_are_launched(titan, assets, tmp_path, world):
    """And misses none: rows of operands, and of gradients where those are reduced and measured.

    Sampled steps run eagerly, so that compiled blocks are compiled in the second one.
    """
    file = tmp_path / "numerics.jsonl"
    gradients = {"reduce_gradients_in_float8": True}
    job = f"{config(monitor_every=3, monitor_file=str(file), **gradients)} {COMPILED}"
    found = graphed(titan, assets, world, job, usual=f"{config(**gradients)} {COMPILED}")
    assert found["kinds"] == ["launched", "launched", "captured", "launched", "replayed"]
    # torch 2.15's aot_eager is not eager code to the bit.
    assert found["losses"] == found["launched"]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    seen = {(row["step"], row["role"]) for row in rows}
    measured = ("x", "w", "dy", "gradient") if world > 1 else ("x", "w", "dy")
    assert seen == {(step, role) for step in (1, 4) for role in measured}


def test_scales_that_are_not_made_after_each_step_are_an_error(titan, assets):
    job = config(precompute_float8_dynamic_scale_for_fsdp=False)
    with pytest.raises(RankFailure, match=r"--training\.disable_cuda_graphs"):
        graphed(titan, assets, 2, job)


@runs.alone
def test_graphs_of_another_kind_are_an_error():
    from torchtitan.distributed import cudagraph

    from f8sub.integrations.torchtitan.hooks import launch_next

    cudagraph._manager._wrappers = [object()]
    with pytest.raises(f8sub.Float8ConfigError, match=r"0\.3\.0 is known.*--training\.disable_cuda_graphs"):
        launch_next()
