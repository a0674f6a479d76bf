"""The launch scripts of recipes/torchtitan: their options say what the pages say, and they train, in small, on CPUs."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.torchtitan.runs import alone
from tests.integrations.torchtitan.test_training import of_torch_2_14
from tests.processes import PYTHONPATH, ROOT

SCRIPTS = ROOT / "recipes" / "torchtitan"
SETTINGS = {
    "llama3_8b.sh": ("8B", 2, 1, 1, False),
    "llama3_70b.sh": ("70B", 16, 8, 1, True),
    "llama3_405b.sh": ("405B", 32, 8, 8, True),
    "convergence.sh bf16": ("8B", 4, 1, 1, False),
    "convergence.sh float8": ("8B", 4, 1, 1, False),
}
"""Flavor, batch of a rank, degrees of tensor and pipeline parallelism, and whether checkpointing is full."""


def command(script: str, *options: str, **variables: str) -> list[str]:
    """What a script would start."""
    name, *arm = script.split()
    how = {"capture_output": True, "text": True, "check": True, "timeout": 600}
    done = subprocess.run([SCRIPTS / name, *arm, *options], env={**os.environ, **variables}, **how)
    return shlex.split(done.stdout)


def test_every_script_is_listed():
    assert {path.name for path in SCRIPTS.glob("*.sh")} == {script.split()[0] for script in SETTINGS}


@alone
@pytest.mark.parametrize("script", SETTINGS)
def test_options_parse(script):
    from torchtitan.config import ConfigManager

    module, program, *options = command(script, "--training.steps", "7", LAUNCHER="echo")
    assert [module, program] == ["-m", "torchtitan.train"]
    config = ConfigManager().parse_args(options)
    training, parallelism = config.training, config.parallelism
    tensor, pipeline = parallelism.tensor_parallel_degree, parallelism.pipeline_parallel_degree
    is_full = "FullAC" in type(config.activation_checkpoint).__qualname__
    found = config.model_spec.flavor, training.local_batch_size, tensor, pipeline, is_full
    assert found == SETTINGS[script]
    assert (training.seq_len, training.steps, parallelism.data_parallel_shard_degree) == (8192, 7, -1)
    assert config.compile.enable
    if "convergence" in script:
        assert config.compile.components == ["model"]
        assert config.metrics.enable_tensorboard
    assert config.compile.enable_async_tensor_parallel == (tensor > 1)
    if pipeline > 1:
        assert config.training.disable_cuda_graphs  # torchtitan refuses them in a pipeline
    assert ("float8" in config.model_spec.model.to_dict()) == ("bf16" not in script)


def test_arms_differ_in_float8_alone():
    control, float8 = (set(command(f"convergence.sh {arm}", LAUNCHER="echo")) for arm in ("bf16", "float8"))
    assert control - float8 == {
        *("llama3", "llama3_8b", "runs/torchtitan/convergence_bf16_seed0"),
        *("--compile.enable", "--compile.components", "model"),  # the ready-made config has these
    }
    assert float8 - control == {"f8sub.titan", "llama3_8b_f8sub", "runs/torchtitan/convergence_float8_seed0"}


def test_launchers():
    """One node and several by torchrun.sh, and Slurm's by slurm.sh."""
    started = command("llama3_8b.sh", PYTHON="echo", NNODES="4", RDZV_ENDPOINT="node0:29500", LAUNCHER="")
    assert started[:4] == ["-m", "torch.distributed.run", "--nnodes", "4"]
    assert "node0:29500" in started
    assert started[started.index("torchtitan.train") - 1] == "-m"
    submitted = command("llama3_70b.sh", LAUNCHER="echo --nodes 32 recipes/launch/slurm.sh")
    assert submitted[:5] == ["--nodes", "32", "recipes/launch/slurm.sh", "-m", "torchtitan.train"]


SMALL_LAUNCHER = """#!/bin/sh
[ "$1 $2" = "-m torchtitan.train" ] && shift 2 &&
    exec recipes/launch/torchrun.sh -m tests.integrations.torchtitan.small "$@"
"""
"""The launcher that the scripts take by default, for a model of another size."""

SHORT = (
    *("--training.steps", "3", "--training.seq_len", "128", "--metrics.log_freq", "1"),
    *("--lr_scheduler.warmup_steps", "2", "--metrics.enable_tensorboard"),
)
COMPILED = ("--compile.backend", "aot_eager")
TP = ("--parallelism.tensor_parallel_degree", "2")
ON_TORCH_2_13 = ("--parallelism.spmd_backend", "partial_dtensor")
# There torch compiles no checkpointed blocks of tensor parallelism, in bf16 neither: a DeviceMesh is no activation.
EAGER = ("--compile.no-enable", "--compile.no-enable_async_tensor_parallel", *ON_TORCH_2_13)

RUNS = [
    ("llama3_70b.sh", (*TP, *EAGER, "--training.local_batch_size", "4"), "tp"),
    pytest.param("llama3_8b.sh", COMPILED, "dp_shard", marks=of_torch_2_14),
    pytest.param(
        "llama3_70b.sh", (*TP, *COMPILED, "--training.local_batch_size", "4"), "tp", marks=of_torch_2_14
    ),
    pytest.param(
        "llama3_405b.sh",
        (
            *("--parallelism.tensor_parallel_degree", "1", "--parallelism.pipeline_parallel_degree", "2"),
            *("--compile.no-enable_async_tensor_parallel", "--training.local_batch_size", "4", *COMPILED),
        ),
        "pp",
        marks=of_torch_2_14,
    ),
]
"""What is run of each script on two ranks, where its own degrees are for hundreds; and what torchtitan says of it. On
torch 2.13 llama3_8b.sh has a test of its own, with another recipe."""


def launched(script: str, assets: Path, folder: Path, *options: str, ranks: int = 2) -> str:
    """What a script's run wrote that succeeded."""
    launcher = folder / "launcher.sh"
    launcher.write_text(SMALL_LAUNCHER)
    launcher.chmod(0o755)
    name, *arm = script.split()
    own = (
        *("--hf_assets_path", assets / "tokenizer", "--dataloader.dataset", "c4_test"),
        *("--dataloader.dataset_path", assets / "data", "--dump_folder", folder),
    )
    variables = {"LAUNCHER": str(launcher), "PYTHON": sys.executable, "PYTHONPATH": PYTHONPATH}
    variables |= {"NPROC_PER_NODE": f"{ranks}", "RDZV_ENDPOINT": "localhost:0"}
    words = [SCRIPTS / name, *arm, *own, *SHORT, *options]
    done = subprocess.run(words, env=os.environ | variables, capture_output=True, text=True, timeout=600)
    said = re.sub(r"\x1b\[[\d;]+m", "", done.stdout + done.stderr)
    assert done.returncode == 0, said
    return said


@pytest.mark.long
@pytest.mark.usefixtures("titan")
@pytest.mark.parametrize(("script", "options", "sharded"), RUNS)
def test_a_script_trains(assets, tmp_path, script, options, sharded):
    check_of(launched(script, assets, tmp_path, *options), script, options, sharded)


def check_of(said: str, script: str, options: tuple[str, ...], sharded: str) -> None:
    """What torchtitan and f8sub tell of a run that succeeded."""
    flavor, *_, is_full = SETTINGS[script]
    assert f"Building llama3 {flavor}" in said
    assert re.search(rf"active dimensions: \[.*'{sharded}'", said), said
    assert f"Applied {'Full' if is_full else 'Selective'}AC" in said
    assert re.search(r"f8sub: \d+ of \d+ linear layers in float8", said), said
    assert ("Compiling each TransformerBlock" in said) == (EAGER[0] not in options)
    assert re.search(r"step: +3 +loss: +[678]\.", said), said
    assert "Training completed" in said


@pytest.mark.long
@pytest.mark.usefixtures("titan")
def test_a_script_with_another_recipe_and_its_options(assets, tmp_path):
    """As the page has it."""
    page = (SCRIPTS / "README.md").read_text()
    (given,) = re.findall(r"llama3_8b\.sh (--override\.imports '.*')", page)
    options = (*COMPILED, *ON_TORCH_2_13, *shlex.split(given))
    said = launched("llama3_8b.sh", assets, tmp_path, *options)
    check_of(said, "llama3_8b.sh", options, "fsdp")
    assert re.search(r"f8sub: 30 of 31 linear layers in float8, .*delayed", said), said
    assert "may not alias" not in said  # torch of an operator that returns an argument


@pytest.mark.long
@pytest.mark.usefixtures("titan")
def test_both_arms_of_the_convergence_test_train_and_are_compared(assets, tmp_path):
    """By the two commands of the page, on one rank, and the third, which reads what they logged."""
    batch = ("--training.local_batch_size", "2", "--training.global_batch_size", "4")
    runs, told = [], {}
    for arm in ("bf16", "float8"):
        folder = tmp_path / arm
        folder.mkdir()
        options = (*batch, "--compile.no-enable", *ON_TORCH_2_13)
        said = launched(f"convergence.sh {arm}", assets, folder, *options, ranks=1)
        assert "gradient accumulation steps 2" in said
        by_step = dict(re.findall(r"step: +(\d) +loss: +([\d.]+)", said))
        told[arm] = [float(loss) for loss in by_step.values()]
        assert ("linear layers in float8" in said) == (arm == "float8")
        runs += ["--recorded", arm, str(folder)]
    figures = tmp_path / "figures.json"
    compared = [sys.executable, ROOT / "scripts" / "loss_compare.py", "--folder", tmp_path, *runs]
    subprocess.run([*compared, "--json", figures], check=True, timeout=600)
    found = json.loads(figures.read_text())
    assert found["logged"] == [1, 2, 3]
    for arm, losses in told.items():
        assert found["train_losses"][arm] == [pytest.approx(losses, abs=1e-4)]
    assert 0 < abs(found["gaps"]["float8"]["gap_percent"]) < 0.05
