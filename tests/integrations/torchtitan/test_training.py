"""torchtitan's trainer with f8sub, 0.3's and 0.2's, on gloo ranks: debug Llama, real text, a tokenizer of its own.

And with features of f8sub: experts, a monitor, gradients and SwiGLU's input in float8.
"""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

import f8sub
from f8sub.integrations.torchtitan.hooks import WANTED
from tests.integrations.torchtitan import runs
from tests.integrations.torchtitan.runs import (
    alone,
    gathered,
    last,
    more_all_reduces,
)
from tests.integrations.torchtitan.test_job_config import converted_by, parsed
from tests.ranks import RankFailure
from tests.selection import long_but

pytestmark = pytest.mark.usefixtures("any_titan")
long = pytest.mark.long
of_0_3 = pytest.mark.skipif(
    runs.installed() == "0.2",
    reason="of torchtitan 0.3, here is 0.2: scripts/test_versions.sh has a row of each",
)

FROM_THE_COMMAND_LINE = "override.imports=" + json.dumps(
    [["f8sub.titan.float8", {"recipe_name": "tensorwise", "emulate": True}], "f8sub.titan.precompute_scales"],
    separators=(",", ":"),
)
TP = "parallelism.tensor_parallel_degree=2"
HSDP = "parallelism.data_parallel_replicate_degree=2 parallelism.data_parallel_shard_degree="
PP = 'parallelism.pipeline_parallel_degree=2 parallelism.pipeline_parallel_schedule="1F1B"'
SPMD = 'parallelism.spmd_backend="spmd_types"'
CP = f"{SPMD} parallelism.context_parallel_degree=2 parallelism.context_parallel_load_balancer=null"
NVFP4 = 'f8sub:{"recipe_name":"nvfp4"}'
NOT_GATHERED = "--f8sub.no-enable-fsdp-float8-all-gather"
DELAYED = 'f8sub:{"recipe_name":"delayed"}'
IN_BF16 = (
    f"f8sub {NOT_GATHERED}" if runs.installed() == "0.2" else 'f8sub:{"enable_fsdp_float8_all_gather":false}'
)
COMPILED = 'compile.enable=true compile.backend="aot_eager"'
EP = "parallelism.expert_parallel_degree=2"
EXPERTS = f'f8sub_moe:{{"experts":true}} {EP}'
TOKENS = f'f8sub_moe:{{"experts":true,"recipe_name":"rowwise","dispatch_tokens_in_float8":true}} {EP}'
GPT_OSS = f'f8sub_gpt_oss:{{"experts":true}} {EP}'
DELAYED_EXPERTS = f'f8sub_moe:{{"experts":true,"recipe_name":"delayed"}} {EP}'

MESHES = {
    "1": (1, ""),
    "fsdp2": (2, ""),
    "hsdp2x2": (4, f"{HSDP}2"),
    "tp2": (2, TP),
    "fsdp2-tp2": (4, TP),
    "pp2": (2, PP),
    "fsdp2-pp2": (4, PP),
    "cp2": (2, CP),
    "spmd-fsdp2": (2, SPMD),
    "spmd-hsdp2x2": (4, f"{SPMD} {HSDP}2"),
    "spmd-tp2": (2, f"{SPMD} {TP}"),
    "spmd-fsdp2-tp2": (4, f"{SPMD} {TP}"),
    "spmd-tp2-pp2": (4, f"{SPMD} {TP} {PP}"),
}
"""World size and options of each way to shard."""

WITHOUT_PIPELINES = (
    "titan 0.3 has pipelines and spmd_types from torch 2.14: scripts/test_versions.sh torch2.14 has it"
)
of_torch_2_14 = pytest.mark.skipif(torch.__version__ < TorchVersion("2.14"), reason=WITHOUT_PIPELINES)


def mesh(name: str) -> Any:
    """A parameter of tests, which is long but for the first."""
    marks = [long] if name != "fsdp2" else []
    needs = SPMD in MESHES[name][1] or (PP in MESHES[name][1] and runs.installed() == "0.3")
    return pytest.param(name, marks=[*marks, of_torch_2_14] if needs else marks)


before_torch_2_14 = pytest.mark.skipif(
    torch.__version__ >= TorchVersion("2.14"),
    reason="torch's RMSNorm has other gradients of its weight there compiled than eager, in the last bits",
)

LINEAR_ELEMENTS = 2 * 256 * (4 * 256 + 3 * 768)
"""Of the converted weights of two blocks."""
LINEAR_LAYERS = 14 if runs.installed() == "0.2" else 10
"""q, k and v are one matrix in torchtitan 0.3."""


# Tensor parallelism alone is in what changes no bit.
@pytest.mark.parametrize("mesh", [mesh(name) for name in MESHES if name not in ("tp2", "spmd-tp2")])
def test_losses_are_as_near_to_bf16s_as_torchtitans_own_converters(train, mesh):
    world, options = MESHES[mesh]
    bf16, peer, ours = (last(train(world, f"{config} {options}")) for config in ("bf16", "peer", "f8sub"))
    assert ours != bf16
    assert abs(ours - bf16) < 4e-3
    assert abs(ours - bf16) < 1.5 * abs(peer - bf16) + 1e-3


OTHERS = ("rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "delayed")


@long
@pytest.mark.parametrize(
    ("mesh", "recipe"),
    [
        *(("fsdp2", recipe) for recipe in (*OTHERS, "gridquant", "nvfp4")),
        *(pytest.param("spmd-tp2", recipe, marks=of_torch_2_14) for recipe in OTHERS),
    ],
)
def test_other_recipes(train, mesh, recipe):
    """With ``spmd-tp2`` parts are no DTensors."""
    world, options = MESHES[mesh]
    bf16 = last(train(world, f"bf16 {options}"))
    ours = last(train(world, f'f8sub:{{"recipe_name":"{recipe}"}} {options}'))
    assert ours != last(train(world, f"f8sub {options}"))
    assert abs(ours - bf16) < 4e-3


@long
@pytest.mark.parametrize(
    ("mesh", "changed", "usual"),
    [
        pytest.param("fsdp2-tp2", f"bf16 {FROM_THE_COMMAND_LINE}", "f8sub", marks=of_0_3),
        ("fsdp2", "f8sub_full_ac", "f8sub"),
        ("tp2", "f8sub_selective_ac", "f8sub"),
        ("fsdp2", f"f8sub_selective_ac {COMPILED}", "f8sub"),
        ("fsdp2", f"{NVFP4} {COMPILED}", NVFP4),
        pytest.param("fsdp2", f"{EXPERTS} {COMPILED}", EXPERTS, marks=of_0_3),
        pytest.param("fsdp2", f"{GPT_OSS} {COMPILED}", GPT_OSS, marks=[of_0_3, before_torch_2_14]),
        pytest.param("fsdp2", f"{TOKENS} {COMPILED}", TOKENS, marks=of_0_3),
        pytest.param("fsdp2", TOKENS.replace("moe", "moe_selective_ac"), TOKENS, marks=of_0_3),
        ("fsdp2-tp2", f"{IN_BF16} {COMPILED}", IN_BF16),
        ("fsdp2-tp2", f"f8sub {COMPILED}", "f8sub"),
        pytest.param("spmd-tp2", f"f8sub {COMPILED}", "f8sub", marks=of_torch_2_14),
        pytest.param("spmd-fsdp2-tp2", f"f8sub {COMPILED}", "f8sub", marks=of_torch_2_14),
    ],
)
def test_what_changes_no_bit(train, mesh, changed, usual):
    """The command line alone instead of the converter, activation checkpointing, compiling."""
    world, options = MESHES[mesh]
    assert train(world, f"{changed} {options}") == train(world, f"{usual} {options}")


@long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            f"{NVFP4} {TP}", r"layers\.0\.\S+: tensor parallelism cuts its w.*'nvfp4'", marks=of_0_3
        ),
        pytest.param(f"{DELAYED} {TP} {COMPILED}", r"which torch\.compile cannot trace", marks=of_0_3),
        pytest.param(
            f"{DELAYED_EXPERTS} {COMPILED}",
            r"inner_experts and 1 more: sharded by tensor or exp",
            marks=of_0_3,
        ),
        pytest.param(
            TOKENS.removesuffix(EP),
            r"is for jobs whose tokens travel to experts of other ranks",
            marks=of_0_3,
        ),
        pytest.param(
            TOKENS.replace("rowwise", "tensorwise"), r"tokens cross in codes of a byte", marks=of_0_3
        ),
    ],
)
def test_what_is_refused_before_the_first_step(any_titan, assets, arguments, message):
    with pytest.raises(RankFailure, match=message):
        any_titan(4, runs.train, arguments.split(), assets)


def parts_of_scales(rank: int, world: int, arguments: list[str], folder: Path) -> tuple[int, int, int]:
    """How many parts the model has here, of how many the hook makes the scales, and how many layers they have."""
    trainer = runs.trainer_of(rank, arguments, folder)
    trainer.train()
    hooks = trainer.optimizers._optimizer_step_post_hooks.values()
    (hook,) = (hook for hook in hooks if hasattr(hook, "parts"))
    found = [m for part in hook.parts for m in part.modules() if isinstance(m, f8sub.Float8Linear)]
    return len(trainer.model_parts), len(hook.parts), len(found)


@long
@pytest.mark.skipif(
    LINEAR_LAYERS == 10 and torch.__version__ < TorchVersion("2.14"), reason=WITHOUT_PIPELINES
)
@pytest.mark.parametrize("config", ["f8sub", pytest.param("f8sub_hooked", marks=of_0_3)])
def test_scales_are_made_once_a_step_for_all_parts_of_a_pipeline(any_titan, assets, config):
    stages = f"{PP.replace('1F1B', 'Interleaved1F1B')} parallelism.pipeline_parallel_layers_per_stage=1"
    found = any_titan(2, parts_of_scales, f"{config} {stages} training.steps=2".split(), assets)
    assert all(parts == hooked == 2 for parts, hooked, _ in found)
    assert sum(layers for *_, layers in found) == LINEAR_LAYERS


def lose(rank: int, world: int, arguments: list[str], folder: Path) -> None:
    """A weight is replaced after sharding."""
    trainer = runs.trainer_of(rank, arguments, folder)
    sharded = trainer.model_parts[0].layers["1"].feed_forward.w2.weight
    sharded._local_tensor = sharded._local_tensor.plain.clone()
    told = r"layers\.1\.feed_forward\.w2: FSDP2 would gather its weight in high precision"
    with pytest.raises(f8sub.Float8ConfigError, match=told):
        trainer.train()
    assert not any(optimizer.state for optimizer in trainer.optimizers)


def test_a_weight_that_is_f8subs_no_more_is_an_error_before_the_first_step(any_titan, assets):
    any_titan(2, lose, ["f8sub"], assets)


@long
def test_a_container_of_optimizers_rolls_amax_histories_once_a_step(any_titan, assets):
    steps = any_titan(2, runs.ages, ['f8sub:{"recipe_name":"delayed"}', "training.steps=3"], assets)[0]
    assert steps == [3] * LINEAR_LAYERS


@long
@of_0_3
def test_chunked_loss_with_the_head_in_float8_too(train):
    """The first loss is that of the same weights; later ones are of gradients that were summed in another order."""
    names = "chunked", "f8sub_chunked", 'f8sub_chunked:{"skip_defaults":false}', "bf16", "f8sub", "peer"
    bf16, ours, with_head, bf16_whole, whole, peer_whole = (train(2, name) for name in names)
    assert ours[1] == pytest.approx(whole[1], abs=1e-5)
    assert len({last(losses) for losses in (bf16, ours, with_head)}) == 3
    assert abs(last(ours) - last(bf16)) < 1.5 * abs(last(peer_whole) - last(bf16_whole)) + 1e-3
    assert abs(last(with_head) - last(bf16)) < 4e-3


COUNTED = ("fsdp2", "hsdp2x2", "fsdp2-tp2", "spmd-fsdp2", "spmd-hsdp2x2", "spmd-fsdp2-tp2")


@pytest.mark.parametrize("mesh", [mesh(name) for name in COUNTED])
def test_weights_cross_the_wire_as_one_byte_and_one_all_reduce_makes_their_scales(any_titan, assets, mesh):
    world, options = MESHES[mesh]
    arguments = f"{options} training.steps=3".split()
    runs_of = (any_titan(world, runs.train, [name, *arguments], assets, True) for name in ("bf16", "f8sub"))
    bf16, ours = (of_ranks[0] for of_ranks in runs_of)
    step = 2  # counted from 0: the optimizer has stepped
    before, after = bf16["bytes"][step], ours["bytes"][step]
    shards = 2 if "hsdp" in mesh else world
    linear = LINEAR_ELEMENTS // shards * 2  # gathered for forward, and for backward
    assert gathered(before) > 2 * linear
    assert gathered(after) == gathered(before) - linear
    if "tp" not in mesh:  # there, x and dy that are cut have amaxes of their own
        assert more_all_reduces(ours, bf16, step) == {("allreduce", "float32"): 1}


@long
@pytest.mark.parametrize("mesh", [mesh(name) for name in ("fsdp2", "fsdp2-tp2", "pp2", "spmd-fsdp2-tp2")])
def test_a_run_resumes_bitwise_and_from_the_others_checkpoint(any_titan, assets, train, tmp_path, mesh):
    """bf16 from float8's; without tensor parallelism float8 from bf16's and bf16 from packed codes, too."""
    world, options = MESHES[mesh]
    shutil.copytree(assets, tmp_path, dirs_exist_ok=True)

    def run(config: str) -> dict[int, float]:
        arguments = f"{config} {options} checkpoint.enable=true".split()
        return any_titan(world, runs.train, arguments, tmp_path)[-1]["losses"]

    others = [("bf16", "f8sub"), (NVFP4, "bf16")] if mesh == "fsdp2" else []
    for config, other in (("f8sub", "bf16"), *others):
        whole = run(config)
        assert whole == train(world, f"{config} {options}")
        saved = tmp_path / "checkpoint" / "step-3"
        assert list(saved.glob("*.distcp"))
        assert not any(b"f8sub" in file.read_bytes() for file in saved.iterdir())
        assert run(f"{config} checkpoint.load_step=3") == {step: whole[step] for step in (4, 5)}
        crossed = run(f"{other} checkpoint.load_step=3")
        assert list(crossed) == [4, 5]
        assert 0 < abs(crossed[5] - whole[5]) < 4e-3
        shutil.rmtree(tmp_path / "checkpoint")


alone_in_0_2 = functools.partial(alone, titan="titan_0_2")
GRADIENTS = 'f8sub:{"reduce_gradients_in_float8":true}'


@long
@pytest.mark.parametrize(("world", "options"), [(2, ""), (2, EP), (4, EP)])
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
@of_0_3
def test_tokens_that_travel_in_float8(any_titan, assets):
    """By an option: a dispatch and the gradient of a combine, of two layers, are half of what crosses."""
    as_they_are = TOKENS.replace(',"dispatch_tokens_in_float8":true', "")
    bf16, ours = (
        any_titan(2, runs.train, config.split(), assets, True)[0] for config in (as_they_are, TOKENS)
    )
    assert abs(last(ours["losses"]) - last(bf16["losses"])) < 1e-3
    sent, in_float8 = (
        sum(
            size
            for (kind, dtype), size in run["bytes"][1].items()
            if kind.startswith("alltoall") and dtype != "int64"
        )
        for run in (bf16, ours)
    )
    assert in_float8 / sent == pytest.approx((1 + (256 + 4) / 512) / 2, abs=1e-3)


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
    assert getattr(converted_by(parsed(tmp_path, section, job=job)), WANTED) == (10, file)


@long
@of_0_3
@pytest.mark.parametrize("mesh", [mesh(name) for name in ("hsdp2x2", "fsdp2-tp2", "fsdp2-pp2")])
def test_losses_with_reductions_in_float8(train, mesh):
    world, options = MESHES[mesh]
    usual, ours = (last(train(world, f"{config} {options}")) for config in ("f8sub", GRADIENTS))
    assert ours != usual
    assert abs(ours - usual) < 4e-3


@long
@pytest.mark.parametrize("mesh", [mesh(name) for name in ("fsdp2", "fsdp2-tp2", "pp2")])
def test_steps_in_one_pass_change_no_loss(train, mesh):
    """Of a CPU, where torch's own kernels take them: clipping by torchtitan's norm reaches them all the same."""
    world, options = MESHES[mesh]
    clipped = f"training.max_norm=0.01 {options}"
    config = "f8sub" if runs.installed() == "0.2" else 'f8sub:{"fuse_optimizer_step":true}'
    more = " --f8sub.fuse_optimizer_step" if runs.installed() == "0.2" else ""
    usual = train(world, f"f8sub {clipped}")
    assert train(world, f"{config}{more} {clipped}") == usual
    assert last(usual) != last(train(world, f"f8sub {options}"))


@long
@of_0_3
def test_one_rank_reduces_nothing(train):
    assert train(1, GRADIENTS) == train(1, "f8sub")


ATTENTION = 'f8sub:{"attention":"float8"}'


@pytest.mark.long
@pytest.mark.parametrize("world", long_but([2], [1, 2]))
def test_attention_in_float8(train, world):
    """By the option alone, and with a backward in bf16."""
    configs = "f8sub", ATTENTION, 'f8sub:{"attention":"float8_forward"}'
    usual, ours, forward = (last(train(world, config)) for config in configs)
    assert len({usual, ours, forward}) == 3
    assert abs(ours - usual) < 4e-3
    assert abs(forward - usual) < 4e-3


@pytest.mark.long
def test_a_run_with_attention_in_float8_resumes_bitwise(any_titan, assets, train, tmp_path):
    """Ranks have other data, and the checkpoint has one history of each module."""
    shutil.copytree(assets, tmp_path, dirs_exist_ok=True)

    def run(options: str) -> dict[int, float]:
        arguments = f"{ATTENTION} checkpoint.enable=true {options}".split()
        return any_titan(2, runs.train, arguments, tmp_path)[-1]["losses"]

    whole = run("")
    assert whole == train(2, ATTENTION)
    assert run("checkpoint.load_step=3") == {step: whole[step] for step in (4, 5)}


@of_0_3
@long
def test_swiglu_input_changes_the_loss_a_little(train):
    usual, ours = (last(train(1, config)) for config in ("f8sub", 'f8sub:{"keep_swiglu_input":"float8"}'))
    assert ours != usual
    assert abs(ours - usual) < 4e-3
