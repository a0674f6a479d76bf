"""torchtitan's trainer with features of f8sub: experts, a monitor, gradients and SwiGLU's input in float8."""

import functools
import json

import pytest

from tests.features.torchtitan import runs
from tests.features.torchtitan.runs import alone, last
from tests.features.torchtitan.test_job_config import converted_by, parsed
from tests.features.torchtitan.test_training import LINEAR_LAYERS, MESHES, long, mesh, of_0_3

pytestmark = pytest.mark.usefixtures("any_titan")
alone_in_0_2 = functools.partial(alone, titan="titan_0_2")
GRADIENTS = 'f8sub:{"reduce_gradients_in_float8":true}'
EP = "parallelism.expert_parallel_degree=2"
of_0_2 = pytest.mark.skipif(
    runs.installed() == "0.3", reason="of torchtitan 0.2, here is 0.3: scripts/test_torchtitan.sh has both"
)


@long
@pytest.mark.parametrize(
    ("world", "options"), [(2, ""), pytest.param(2, EP, marks=of_0_2), pytest.param(4, EP, marks=of_0_2)]
)
def test_experts(train, world, options):
    """By the option alone, and as near to bf16 as linear layers are."""
    recipe = '"recipe_name":"rowwise"'
    bf16, linears, ours = (
        last(train(world, f"{config} {options}"))
        for config in ("moe", f"f8sub_moe:{{{recipe}}}", f'f8sub_moe:{{{recipe},"experts":true}}')
    )
    assert len({bf16, linears, ours}) == 3
    assert abs(ours - bf16) < 4e-3


@long
@pytest.mark.parametrize("mesh", [mesh(name) for name in ("fsdp2", "pp2")])
def test_a_monitor_by_an_option_changes_no_loss(train, mesh, tmp_path):
    """The first step is measured, and every second one after it."""
    world, options = MESHES[mesh]
    file = tmp_path / "numerics.jsonl"
    said = json.dumps({"monitor_every": 2, "monitor_file": str(file)}, separators=(",", ":"))
    watched = train(world, f"f8sub:{said} {options}")
    assert watched == train(world, f"f8sub:{{}} {options}")
    files = sorted(tmp_path.iterdir())
    later = ["numerics.1.jsonl"] if mesh == "pp2" else []
    assert [each.name for each in files] == [*later, "numerics.jsonl"]
    rows = [json.loads(line) for each in files for line in each.read_text().splitlines()]
    assert {row["step"] for row in rows} == {1, 3, 5}
    assert len(rows) == 3 * 3 * LINEAR_LAYERS
    assert {row["role"] for row in rows} == {"x", "w", "dy"}


@alone_in_0_2
@pytest.mark.parametrize(
    ("said", "file"), [("", "dump/numerics.jsonl"), ('monitor_file = "n.jsonl"', "n.jsonl")]
)
def test_a_monitors_rows_go_to_the_jobs_folder(tmp_path, said, file):
    section = f"[f8sub]\nmonitor_every = 10\n{said}"
    job = 'custom_config_module = "f8sub.titan"\ndump_folder = "dump"'
    assert converted_by(parsed(tmp_path, section, job=job)).float8_monitor == (10, file)


@long
@of_0_3
@pytest.mark.parametrize("mesh", [mesh(name) for name in ("hsdp2x2", "fsdp2-tp2", "fsdp2-pp2")])
def test_losses_with_reductions_in_float8(train, mesh):
    world, options = MESHES[mesh]
    usual, ours = (last(train(world, f"{config} {options}")) for config in ("f8sub", GRADIENTS))
    assert ours != usual
    assert abs(ours - usual) < 4e-3


@long
@of_0_3
def test_one_rank_reduces_nothing(train):
    assert train(1, GRADIENTS) == train(1, "f8sub")


@of_0_3
def test_swiglu_input_changes_the_loss_a_little(train):
    usual, ours = (last(train(1, config)) for config in ("f8sub", 'f8sub:{"keep_swiglu_input":"float8"}'))
    assert ours != usual
    assert abs(ours - usual) < 4e-3
