"""torchtitan 0.2's trainer with f8sub: its converter by name, its section in a job's TOML, on gloo ranks."""

import functools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

import f8sub
from f8sub.features.torchtitan import scales
from tests.features.torchtitan import pipelined, runs
from tests.features.torchtitan.jobs_0_2 import job_file
from tests.features.torchtitan.runs import gathered, last, more_all_reduces
from tests.ranks import RankFailure

pytestmark = pytest.mark.usefixtures("titan_0_2")
alone = functools.partial(runs.alone, titan="titan_0_2")
long = pytest.mark.long

TP = "--parallelism.tensor_parallel_degree=2"
HSDP = "--parallelism.data_parallel_replicate_degree=2 --parallelism.data_parallel_shard_degree="
PP = "--parallelism.pipeline_parallel_degree=2 --parallelism.pipeline_parallel_schedule=1F1B"
COMPILED = "--compile.enable --compile.backend=aot_eager --compile.components=model"
MESHES = {
    "1": (1, ""),
    "fsdp2": (2, ""),
    "hsdp2x1": (2, f"{HSDP}1"),
    "tp2": (2, TP),
    "pp2": (2, PP),
    "fsdp2-tp2": (4, TP),
    "fsdp2-pp2": (4, PP),
}
"""World size and options of each way to shard."""

LINEAR_ELEMENTS = 2 * 256 * (4 * 256 + 3 * 768)
"""Of the converted weights of two blocks."""


def parsed(
    folder: Path, section: str, *options: str, job: str = 'custom_config_module = "f8sub.titan"'
) -> Any:
    """A job's config, of a TOML file and options of the command line."""
    from torchtitan.config import ConfigManager

    file = folder / "job.toml"
    file.write_text(f'[job]\n{job}\n[model]\nconverters = ["f8sub"]\n{section}\n')
    return ConfigManager().parse_args([f"--job.config_file={file}", *options])


def converted_by(config: Any) -> torch.nn.Module:
    """The debug model, converted as the trainer does."""
    from torchtitan.protocols.model_converter import build_model_converters
    from torchtitan.protocols.train_spec import get_train_spec

    spec = get_train_spec("llama3")
    with torch.device("meta"):
        model = spec.model_cls(spec.model_args["debugmodel"])
    build_model_converters(config, None).convert(model)
    return model


def layers(model: torch.nn.Module) -> dict[str, Any]:
    return {fqn: layer for fqn, layer in model.named_modules() if isinstance(layer, f8sub.Float8Linear)}


@alone
def test_the_converter_is_found_by_its_name_and_on_by_default(tmp_path):
    found = layers(converted_by(parsed(tmp_path, "")))
    dense = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
    dense += ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
    assert set(found) == {f"layers.{i}.{name}" for i in range(2) for name in dense}
    assert {layer.plan.recipe.name for layer in found.values()} == {"tensorwise"}
    assert all(layer.float8_all_gather for layer in found.values())


@alone
def test_the_section_is_parsed_and_the_command_line_wins(tmp_path):
    section = '[f8sub]\nrecipe_name = "blockwise"\nfilter_fqns = ["attention"]\nemulate = true'
    found = layers(converted_by(parsed(tmp_path, section)))
    assert {fqn.split(".")[-1] for fqn in found} == {"w1", "w2", "w3"}
    assert {layer.plan.recipe.name for layer in found.values()} == {"blockwise"}
    assert {layer.plan.backend for layer in found.values()} == {"reference"}
    options = "--f8sub.recipe_name=rowwise", "--f8sub.filter_fqns=layers.0.,w2", "--f8sub.no-emulate"
    found = layers(converted_by(parsed(tmp_path, section, *options)))
    assert {layer.plan.recipe.name for layer in found.values()} == {"rowwise"}
    assert set(found) == {f"layers.1.{name}" for name in ("feed_forward.w1", "feed_forward.w3")} | {
        f"layers.1.attention.{name}" for name in ("wq", "wk", "wv", "wo")
    }


@alone
def test_options_of_recipes_and_what_is_kept_of_x(tmp_path):
    section = """
[f8sub]
recipe_name = "delayed"
[f8sub.recipe_options]
margin = 2.5
amax_compute_algo = "most_recent"
override_linear_precision = [false, false, false]
reduce_amax = false
[f8sub.keep_x]
wo = "high_precision"
"""
    model = converted_by(parsed(tmp_path, section))
    found = layers(model)
    said = {"margin": 2.5, "amax_compute_algo": "most_recent", "reduce_amax": False}
    assert {layer.plan.recipe for layer in found.values()} == {f8sub.get_recipe("delayed", **said)}
    assert {fqn.split(".")[-1] for fqn, layer in found.items() if layer.keep_x == "high_precision"} == {"wo"}


@alone
def test_options_of_recipes_on_the_command_line(tmp_path):
    options = "margin 3 reduce_amax False amax_compute_algo most_recent"
    others = ["--f8sub.recipe_name=delayed", "--f8sub.keep_x=recompute"]
    model = converted_by(parsed(tmp_path, "", *others, "--f8sub.recipe_options", *options.split()))
    said = {"margin": 3, "reduce_amax": False, "amax_compute_algo": "most_recent"}
    found = layers(model).values()
    assert {layer.plan.recipe for layer in found} == {f8sub.get_recipe("delayed", **said)}
    assert {layer.keep_x for layer in found} == {"recompute"}


@alone
def test_options_of_the_recipes_of_layers(tmp_path):
    section = """
[f8sub.recipe_name]
feed_forward = "gridquant"
"*" = "nvfp4"
[f8sub.recipe_options]
gridquant = { block = 64, dy = "float8_e4m3fn" }
nvfp4 = { hadamard = true }
"""
    found = layers(converted_by(parsed(tmp_path, section)))
    grid = f8sub.get_recipe("gridquant", block=64, dy=torch.float8_e4m3fn)
    assert found["layers.1.feed_forward.w2"].plan.recipe == grid
    assert found["layers.1.attention.wo"].plan.recipe == f8sub.get_recipe("nvfp4", hadamard=True)


@alone
@pytest.mark.parametrize(
    ("section", "error", "says"),
    [
        ('recipe_nam = "rowwise"', ValueError, "recipe_nam"),
        ('recipe_name = "tensorwize"', f8sub.Float8ConfigError, "tensorwize.*tensorwise"),
        ('recipe_name = "delayed"\nrecipe_options = {margn = 2}', f8sub.Float8ConfigError, "margn.*margin"),
        ('recipe_name = "gridquant"\nrecipe_options = {block = 0}', f8sub.Float8ConfigError, "'block': 0"),
        ('recipe_options = "margin"', f8sub.Float8ConfigError, "recipe_options='margin' is no mapping"),
        ('keep_x = "float16"', f8sub.Float8ConfigError, "keep_x='float16'"),
        ('filter_fqns = "output"', f8sub.Float8ConfigError, r"\['output'\]"),
        ('filter_fqns = ["outptu"]', f8sub.Float8ConfigError, "outptu.*output"),
        ('filter_fqns = ["layers"]', f8sub.Float8ConfigError, "nothing to convert"),
        (
            "enable_fsdp_float8_all_gather = false\nprecompute_float8_dynamic_scale_for_fsdp = true",
            f8sub.Float8ConfigError,
            "enable_fsdp_float8_all_gather=False",
        ),
    ],
)
def test_a_mistake_is_an_error_before_the_model_is_sharded(tmp_path, section, error, says):
    with pytest.raises(error, match=says):
        converted_by(parsed(tmp_path, f"[f8sub]\n{section}"))


@alone
def test_a_config_without_the_section_is_an_error_that_says_how_to_have_it(tmp_path):
    import f8sub.titan

    config = parsed(tmp_path, "", job='description = "without"')
    with pytest.raises(f8sub.Float8ConfigError, match=r"custom_config_module=f8sub\.titan"):
        converted_by(config)


@pytest.mark.parametrize(
    "mesh", ["1", "fsdp2", *(pytest.param(name, marks=long) for name in list(MESHES)[2:])]
)
def test_losses_are_as_near_to_bf16s_as_torchtitans_own_converters(train, mesh):
    world, options = MESHES[mesh]
    bf16, peer, ours = (last(train(world, f"{arm} {options}")) for arm in ("bf16", "peer", "f8sub"))
    assert ours != bf16
    assert abs(ours - bf16) < 4e-3
    assert abs(ours - bf16) < 1.5 * abs(peer - bf16) + 1e-3


FULL = "--activation_checkpoint.mode=full"
SELECTIVE = "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=op"


@long
@pytest.mark.parametrize(
    ("mesh", "changed"),
    [("fsdp2", COMPILED), *((m, ac) for m in ("fsdp2", "tp2") for ac in (FULL, SELECTIVE))],
)
def test_what_changes_no_bit(train, mesh, changed):
    world, options = MESHES[mesh]
    assert train(world, f"f8sub {options} {changed}") == train(world, f"f8sub {options}")


@pytest.mark.parametrize("mesh", ["fsdp2", pytest.param("fsdp2-tp2", marks=long)])
def test_weights_cross_the_wire_as_one_byte_and_one_all_reduce_makes_their_scales(titan_0_2, assets, mesh):
    world, options = MESHES[mesh]
    arguments = [*options.split(), "--training.steps=3"]
    bf16, ours = (titan_0_2(world, runs.count, [arm, *arguments], assets)[0] for arm in ("bf16", "f8sub"))
    step = 2  # counted from 0: the optimizer has stepped
    linear = LINEAR_ELEMENTS // world * 2  # gathered for forward, and for backward
    assert gathered(bf16["bytes"][step]) > 2 * linear
    assert gathered(ours["bytes"][step]) == gathered(bf16["bytes"][step]) - linear
    if mesh == "fsdp2":  # with tensor parallelism, x and dy that are cut have amaxes of their own
        assert more_all_reduces(ours, bf16, step) == {("allreduce", "float32"): 1}


def parts_of_scales(rank: int, world: int, arguments: list[str], folder: Path) -> tuple[int, list[int], int]:
    """How many parts the model has here, of how many layers each, and of how many the hook makes the scales."""
    trainer = runs.trainer_of(rank, arguments, folder)
    trainer.train()
    hooks = trainer.optimizers._optimizer_step_post_hooks.values()
    (hook,) = (hook for hook in hooks if hasattr(hook, "parts"))
    assert trainer.optimizers in scales._attached
    return len(trainer.model_parts), [len(layers(part)) for part in trainer.model_parts], len(hook.parts)


@long
def test_scales_are_made_once_a_step_for_all_parts_of_a_pipeline(titan_0_2, assets):
    stages = (
        "--parallelism.pipeline_parallel_degree=2 --parallelism.pipeline_parallel_schedule=Interleaved1F1B"
    )
    options = [*stages.split(), "--parallelism.pipeline_parallel_layers_per_stage=1", "--training.steps=2"]
    found = titan_0_2(2, parts_of_scales, ["f8sub", *options], assets)
    assert all(parts == hooked == 2 for parts, _, hooked in found)
    assert sum(sum(counts) for _, counts, _ in found) == 14


def lose(rank: int, world: int, arguments: list[str], folder: Path) -> str:
    """A weight is replaced after sharding; what training says, and whether an optimizer had stepped."""
    trainer = runs.trainer_of(rank, arguments, folder)
    layer = trainer.model_parts[0].layers["1"].feed_forward.w2
    sharded = layer.weight
    sharded._local_tensor = sharded._local_tensor.plain.clone()
    with pytest.raises(f8sub.Float8ConfigError) as raised:
        trainer.train()
    assert not any(optimizer.state for optimizer in trainer.optimizers)
    return str(raised.value)


def test_a_weight_that_is_f8subs_no_more_is_an_error_before_the_first_step(titan_0_2, assets):
    for said in titan_0_2(2, lose, ["f8sub"], assets):
        assert "layers.1.feed_forward.w2: FSDP2 would gather its weight in high precision" in said


@long
def test_tensor_parallelism_compiled_is_an_error_before_the_first_step(titan_0_2, assets):
    with pytest.raises(RankFailure, match=r"which torch\.compile cannot trace"):
        titan_0_2(4, runs.train, f"f8sub {TP} {COMPILED}".split(), assets)


@long
@pytest.mark.skipif(
    torch.__version__ >= TorchVersion("2.13"),
    reason="on torch 2.13 torchtitan 0.2 compiles no tensor parallelism: scripts/test_torchtitan.sh has 2.11",
)
@pytest.mark.parametrize("arm", ["bf16", "f8sub", "f8sub --f8sub.no-emulate"])
def test_asynchronous_tensor_parallelism_changes_no_bit(titan_0_2, assets, train, arm):
    """What is gathered is multiplied in bf16, and quantized first in float8: there nothing is fused.

    Nor are products of float8, of ``torch._scaled_mm``, with what is made of their sums.
    """
    options = f"{TP} --training.dtype=bfloat16"
    losses, ran = titan_0_2(2, pipelined.train, f"{arm} {options}".split(), assets)[0]
    assert losses == train(2, f"{arm} {options}")
    steps, blocks, passes = 5, 2, 2
    fused = {"fused_all_gather_matmul": 2 * passes, "fused_matmul_reduce_scatter": 2}
    expected = {name: count * blocks * steps for name, count in fused.items()}
    assert ran == (expected if arm == "bf16" else {})


@long
@pytest.mark.parametrize("mesh", ["fsdp2", "hsdp2x1", "tp2", "fsdp2-tp2"])
def test_a_run_resumes_bitwise_and_bf16_and_float8_read_each_others_checkpoints(
    titan_0_2, assets, tmp_path, mesh
):
    world, options = MESHES[mesh]
    shutil.copytree(assets, tmp_path, dirs_exist_ok=True)

    def run(arm: str, *more: str) -> dict[int, float]:
        arguments = [arm, *options.split(), "--checkpoint.enable", *more]
        return titan_0_2(world, runs.train, arguments, tmp_path)[0]["losses"]

    for first, second in (("f8sub", "bf16"), ("bf16", "f8sub")):
        whole = run(first)
        assert list(whole) == [1, 2, 3, 4, 5]
        saved = tmp_path / "checkpoint" / "step-3"
        assert list(saved.glob("*.distcp"))
        assert not any(b"f8sub" in file.read_bytes() for file in saved.iterdir())
        assert run(first, "--checkpoint.load_step=3") == {step: whole[step] for step in (4, 5)}
        crossed = run(second, "--checkpoint.load_step=3")
        assert list(crossed) == [4, 5]
        assert 0 < abs(crossed[5] - whole[5]) < 4e-3
        shutil.rmtree(tmp_path / "checkpoint")


@long
def test_torchtitans_command_line_under_torchrun(assets, tmp_path):
    shutil.copytree(assets, tmp_path, dirs_exist_ok=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
        *("-m", "tests.features.torchtitan.cpu_0_2", "--job.config_file", str(job_file("bf16", tmp_path))),
        *("--training.steps=2", "--job.custom_config_module=f8sub.titan", "--model.converters=f8sub"),
        *("--f8sub.recipe_name=rowwise", "--f8sub.emulate"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "14 of 15 linear layers in float8" in said
    assert "Training completed" in said
