"""torchtitan's trainer with f8sub, on gloo ranks: debug Llama, real text, a tokenizer trained on the spot."""

import json
import shutil
import subprocess
import sys
from collections import Counter

import pytest

from tests.titan import runs

pytestmark = pytest.mark.usefixtures("titan")
long = pytest.mark.long

FROM_THE_COMMAND_LINE = "override.imports=" + json.dumps(
    [["f8sub.titan.float8", {"recipe_name": "tensorwise", "emulate": True}], "f8sub.titan.precompute_scales"],
    separators=(",", ":"),
)
TP = "parallelism.tensor_parallel_degree=2"
HSDP = "parallelism.data_parallel_replicate_degree=2 parallelism.data_parallel_shard_degree="
COMPILED = 'compile.enable=true compile.backend="aot_eager"'

MESHES = {
    "1": (1, ""),
    "fsdp2": (2, ""),
    "fsdp4": (4, ""),
    "hsdp2x1": (2, f"{HSDP}1"),
    "hsdp2x2": (4, f"{HSDP}2"),
    "tp2": (2, TP),
    "fsdp2-tp2": (4, TP),
}
"""World size and options of each way to shard."""

meshes = pytest.mark.parametrize(
    "mesh", ["fsdp2", *(pytest.param(name, marks=long) for name in MESHES if name != "fsdp2")]
)


LINEAR_ELEMENTS = 2 * 256 * (768 + 256 + 3 * 768)
"""Of the converted weights of two blocks."""


def last(losses: dict[int, float]) -> float:
    assert list(losses) == [1, 2, 3, 4, 5]
    return losses[5]


@meshes
def test_losses_are_as_near_to_bf16s_as_torchtitans_own_converters(train, mesh):
    world, options = MESHES[mesh]
    bf16, peer, ours = (last(train(world, f"{config} {options}")) for config in ("bf16", "peer", "f8sub"))
    assert ours != bf16
    assert abs(ours - bf16) < 4e-3
    assert abs(ours - bf16) < 1.5 * abs(peer - bf16) + 1e-3


@pytest.mark.parametrize("mesh", [pytest.param(mesh, marks=long) for mesh in ("1", "fsdp2", "fsdp2-tp2")])
def test_the_command_line_alone_does_what_the_converter_does(train, mesh):
    world, options = MESHES[mesh]
    assert train(world, f"bf16 {FROM_THE_COMMAND_LINE} {options}") == train(world, f"f8sub {options}")


@long
@pytest.mark.parametrize(
    "recipe", ["rowwise", "rowwise_with_gw_hp", "blockwise", "gridquant", "mxfp8", "delayed"]
)
def test_other_recipes(train, recipe):
    bf16 = last(train(2, "bf16"))
    ours = last(train(2, f'f8sub:{{"recipe_name":"{recipe}"}}'))
    assert ours != last(train(2, "f8sub"))
    assert abs(ours - bf16) < 4e-3


@long
@pytest.mark.parametrize("ac", ["full", "selective"])
@pytest.mark.parametrize("mesh", ["fsdp2", "tp2"])
def test_activation_checkpointing_changes_no_bit(train, ac, mesh):
    world, options = MESHES[mesh]
    assert train(world, f"f8sub_{ac}_ac {options}") == train(world, f"f8sub {options}")


@long
@pytest.mark.parametrize("config", ["f8sub", "f8sub_selective_ac"])
def test_compiling_changes_no_bit(train, config):
    assert train(2, f"{config} {COMPILED}") == train(2, "f8sub")


@long
def test_tensor_parallelism_compiled_is_an_error_before_the_first_step(titan, assets):
    from tests.dist.ranks import RankFailure

    with pytest.raises(RankFailure, match=r"which torch\.compile cannot trace"):
        titan(2, runs.train, f"f8sub_hooked {TP} {COMPILED}".split(), assets)


@long
def test_a_container_of_optimizers_rolls_amax_histories_once_a_step(titan, assets):
    steps = titan(2, runs.ages, ['f8sub:{"recipe_name":"delayed"}', "training.steps=3"], assets)[0]
    assert steps == [3] * 10


@long
def test_chunked_loss_with_the_head_in_float8_too(train):
    names = "chunked", "f8sub_chunked", 'f8sub_chunked:{"skip":[]}'
    bf16, ours, with_head = (last(train(2, name)) for name in names)
    assert ours == pytest.approx(last(train(2, "f8sub")), abs=1e-4)
    assert with_head not in (bf16, ours)
    assert abs(with_head - bf16) < 4e-3


@pytest.mark.parametrize(
    "mesh", ["fsdp2", *(pytest.param(m, marks=long) for m in ("fsdp4", "hsdp2x2", "fsdp2-tp2"))]
)
def test_weights_cross_the_wire_as_one_byte_and_one_all_reduce_makes_their_scales(titan, assets, mesh):
    world, options = MESHES[mesh]
    arguments = f"{options} training.steps=3".split()
    bf16, ours = (titan(world, runs.count, [name, *arguments], assets)[0] for name in ("bf16", "f8sub"))
    step = 2  # counted from 0: the optimizer has stepped
    before, after = bf16["bytes"][step], ours["bytes"][step]
    shards = 2 if mesh == "hsdp2x2" else world
    linear = LINEAR_ELEMENTS // shards * 2  # gathered for forward, and for backward
    assert gathered(before) > 2 * linear
    assert gathered(after) == gathered(before) - linear
    if "tp" not in mesh:  # there, x and dy that are cut have amaxes of their own
        extra = {
            key: n - bf16["calls"][step][key]
            for key, n in ours["calls"][step].items()
            if key[0] == "allreduce"
        }
        assert {key: n for key, n in extra.items() if n} == {("allreduce", "float32"): 1}


def gathered(bytes: Counter[tuple[str, str]]) -> int:
    return sum(count for (kind, _), count in bytes.items() if kind == "allgather")


@long
@pytest.mark.parametrize("mesh", ["fsdp2", "hsdp2x2", "tp2", "fsdp2-tp2"])
def test_a_run_resumes_bitwise_and_in_bf16(titan, assets, train, tmp_path, mesh):
    world, options = MESHES[mesh]
    shutil.copytree(assets, tmp_path, dirs_exist_ok=True)
    saving = f"{options} checkpoint.enable=true"

    def run(config: str) -> dict[int, float]:
        return titan(world, runs.train, f"{config} {saving}".split(), tmp_path)[0]["losses"]

    whole = train(world, f"f8sub {options}")
    first = run("f8sub training.steps=3 lr_scheduler.total_steps=5")
    assert first == {step: whole[step] for step in (1, 2, 3)}
    files = list((tmp_path / "checkpoint" / "step-3").glob("*.distcp"))
    assert files
    assert not any(b"f8sub" in file.read_bytes() for file in files)
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "kept")
    assert run("f8sub") == {step: whole[step] for step in (4, 5)}

    shutil.rmtree(tmp_path / "checkpoint")
    shutil.copytree(tmp_path / "kept", tmp_path / "checkpoint")
    in_bf16 = run("bf16")
    assert list(in_bf16) == [4, 5]
    assert in_bf16 != {step: whole[step] for step in (4, 5)}
    assert abs(in_bf16[5] - whole[5]) < 4e-3


@long
def test_200_steps_are_as_near_to_bf16s_as_torchtitans_own_converters(titan, assets):
    options = ["training.steps=200", "training.seq_len=64", "lr_scheduler.warmup_steps=20"]
    bf16, peer, ours = (
        titan(2, runs.train, [config, *options], assets, timeout=500.0)[0]["losses"]
        for config in ("bf16", "peer", "f8sub")
    )
    ours_off, peers_off = (
        sum(abs(run[step] - bf16[step]) for step in bf16) / len(bf16) for run in (ours, peer)
    )
    assert bf16[200] < bf16[1] - 2
    # Measured 0.0020 and 0.0021; both are rounding noise that another CPU's kernels turn into other numbers.
    assert ours_off <= 1.25 * peers_off


@long
def test_torchtitans_command_line_under_torchrun(assets, tmp_path):
    shutil.copytree(assets, tmp_path, dirs_exist_ok=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
        *("-m", "tests.titan.cpu", "--module", "tests.titan.configs", "--config", "bf16"),
        *(
            "--hf_assets_path",
            str(tmp_path / "tokenizer"),
            "--dataloader.dataset_path",
            str(tmp_path / "data"),
        ),
        *("--dump_folder", str(tmp_path), "--training.steps", "2", "--override.imports"),
        *(
            'f8sub.titan.float8={"recipe_name": "tensorwise", "emulate": true}',
            "f8sub.titan.precompute_scales",
        ),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert "10 of 11 linear layers in float8" in said
    assert "Training completed" in said
