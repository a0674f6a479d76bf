"""torchtitan 0.2's trainer with f8sub on GPUs and NCCL: debug Llama, real text, a tokenizer trained on the spot.

torchtitan 0.3 does not import on torch 2.11. What a run is told to do is in
``tests/integrations/torchtitan/jobs_0_2.py``.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda import titan
from tests.integrations.torchtitan import gloo
from tests.integrations.torchtitan.runs import gathered, last, more_all_reduces
from tests.integrations.torchtitan.test_training import LINEAR_ELEMENTS

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")
RECIPES += ("gridquant", "delayed", "mxfp8", "nvfp4")
COMPILED = "--compile.enable"
DETERMINISTIC = "--debug.deterministic"
# Without FSDP2 torchtitan mixes no precisions when it shards by tensor parallelism.
TP = "--parallelism.tensor_parallel_degree=2 --training.dtype=bfloat16"
MESHES = {"1": (1, ""), "fsdp2": (2, ""), "tp2": (2, TP)}
"""World size and options of each way to shard."""

# Those whose native GEMMs are Hopper's, compiled; of delayed and nvfp4 tensor parallelism needs f8sub's own styles.
CASES = [
    *(("fsdp2", "", recipe) for recipe in RECIPES),
    *(("fsdp2", COMPILED, recipe) for recipe in RECIPES[:-2]),
    *(("tp2", "", recipe) for recipe in RECIPES[:4]),
    *(("tp2", COMPILED, recipe) for recipe in ("tensorwise", "rowwise")),
    *(("1", how, "tensorwise") for how in ("", COMPILED)),
]
ASYNCHRONOUS = ("bf16", "f8sub --f8sub.recipe_name=tensorwise")
"""Arms, whose runs without are made for other tests too."""
pytestmark = pytest.mark.usefixtures("titan_on_gpus")


def on(mesh: str, *values: Any) -> Any:
    """A parameter of tests, skipped where there are fewer GPUs."""
    world = MESHES[mesh][0]
    name = "-".join(str(value).replace(COMPILED, "compiled") or "eager" for value in (mesh, *values))
    few = pytest.mark.skipif(torch.cuda.device_count() < world, reason="needs two CUDA devices")
    return pytest.param(mesh, *values, marks=[few], id=name)


@pytest.fixture(scope="session")
def assets(titan_on_gpus: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and a data set."""
    folder = tmp_path_factory.mktemp("titan")
    titan_on_gpus(1, gloo.make_assets, folder)
    return folder


@pytest.fixture(scope="session")
def trained(titan_on_gpus: Callable[..., list[Any]], assets: Path) -> Callable[[int, str], dict[int, float]]:
    """Losses by step; the same run is made once."""

    @functools.cache
    def run(world: int, arguments: str) -> dict[int, float]:
        return titan_on_gpus(world, titan.train, arguments.split(), assets)[0]["losses"]

    return run


@pytest.fixture
def train(trained: Any, record_property: Callable[[str, object], None]) -> Callable[..., dict[int, float]]:
    """``train(mesh, "f8sub --option")``: losses by step, which are in pytest's report."""

    def run(mesh: str, arguments: str) -> dict[int, float]:
        world, options = MESHES[mesh]
        losses = trained(world, " ".join(f"{arguments} {options}".split()))
        record_property(f"{mesh}: {arguments}", losses)
        return losses

    return run


@pytest.mark.parametrize(("mesh", "how", "recipe"), [on(*case) for case in CASES])
def test_losses_are_near_bf16s(train, mesh, how, recipe):
    bf16 = last(train(mesh, f"bf16 {how}"))
    ours = last(train(mesh, f"f8sub --f8sub.recipe_name={recipe} {how}"))
    assert ours != bf16
    assert abs(ours - bf16) < 4e-3


@pytest.mark.parametrize(
    ("mesh", "how"), [on(mesh, how) for mesh in ("1", "fsdp2") for how in ("", COMPILED)]
)
def test_losses_are_as_near_to_bf16s_as_torchtitans_own_converters(train, mesh, how):
    bf16, peer = (last(train(mesh, f"{arm} {how}")) for arm in ("bf16", "peer"))
    ours = last(train(mesh, f"f8sub --f8sub.recipe_name=tensorwise {how}"))
    assert abs(ours - bf16) < 1.5 * abs(peer - bf16) + 1e-3


@pytest.mark.parametrize(
    ("mesh", "ac"), [on(mesh, ac) for mesh in ("fsdp2", "tp2") for ac in ("full", "selective")]
)
def test_activation_checkpointing_changes_no_bit(train, mesh, ac):
    checkpointed = f"--activation_checkpoint.mode={ac} --activation_checkpoint.selective_ac_option=op"
    plain = train(mesh, f"f8sub {DETERMINISTIC}")
    assert list(plain) == [1, 2, 3, 4, 5]
    assert train(mesh, f"f8sub {DETERMINISTIC} {checkpointed}") == plain


@pytest.mark.parametrize("mesh", [on("fsdp2")])
def test_weights_cross_nccl_as_one_byte_and_one_all_reduce_makes_their_scales(
    titan_on_gpus, assets, mesh, record_property
):
    world, step = 2, 2  # counted from 0: the optimizer has stepped
    bf16, ours = (
        titan_on_gpus(world, titan.train, [arm, "--training.steps=3"], assets, True)[0]
        for arm in ("bf16", "f8sub")
    )
    linear = LINEAR_ELEMENTS // world * 2  # gathered for forward, and for backward
    before, after = (gathered(run["bytes"][step]) for run in (bf16, ours))
    record_property("bytes gathered of a step, bf16 and float8", (before, after, linear))
    assert before > 2 * linear
    assert after == before - linear
    assert more_all_reduces(ours, bf16, step) == {("allreduce", "float32"): 1}


@pytest.mark.parametrize(("mesh", "arm"), [on("tp2", arm) for arm in ASYNCHRONOUS])
def test_asynchronous_tensor_parallelism(titan_on_gpus, train, assets, mesh, arm, record_property):
    """Inductor fuses what is gathered with the products that take it, and products with what is made of their sums.

    That may hang where symmetric memory does not work: it has 90 seconds, not the 240 of other runs.
    """
    world, options = MESHES[mesh]
    arguments = f"{arm} {options} {COMPILED} --parallelism.enable_async_tensor_parallel".split()
    losses, ran = titan_on_gpus(world, titan.train_asynchronously, arguments, assets, timeout=90.0)[0]
    record_property("operators on symmetric memory", ran)
    assert abs(last(losses) - last(train(mesh, f"{arm} {COMPILED}"))) < 4e-3
    fused = {name for name in ran if name.startswith("symm_mem::fused")}
    if arm == "bf16":
        assert {"symm_mem::fused_all_gather_matmul", "symm_mem::fused_matmul_reduce_scatter"} <= fused
