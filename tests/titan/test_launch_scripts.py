"""Every option of recipes/torchtitan is one that torchtitan's ConfigManager takes, and says what the pages say."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.titan.runs import alone

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "recipes" / "torchtitan"
SETTINGS: dict[str, dict[str, Any]] = {
    "llama3_8b.sh": {"flavor": "8B", "batch": 2, "tensor": 1, "pipeline": 1, "full": False},
    "llama3_70b.sh": {"flavor": "70B", "batch": 16, "tensor": 8, "pipeline": 1, "full": True},
    "llama3_405b.sh": {"flavor": "405B", "batch": 32, "tensor": 8, "pipeline": 8, "full": True},
    "convergence.sh bf16": {"flavor": "8B", "batch": 4, "tensor": 1, "pipeline": 1, "full": False},
    "convergence.sh float8": {"flavor": "8B", "batch": 4, "tensor": 1, "pipeline": 1, "full": False},
}


def command(script: str, *options: str, **variables: str) -> list[str]:
    """What a script would start."""
    name, *arm = script.split()
    done = subprocess.run(
        [SCRIPTS / name, *arm, *options],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
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
    expected = SETTINGS[script]
    assert config.model_spec.flavor == expected["flavor"]
    assert (config.training.local_batch_size, config.training.seq_len) == (expected["batch"], 8192)
    assert config.training.steps == 7
    parallelism = config.parallelism
    assert (parallelism.tensor_parallel_degree, parallelism.pipeline_parallel_degree) == (
        expected["tensor"],
        expected["pipeline"],
    )
    assert parallelism.data_parallel_shard_degree == -1
    assert ("FullAC" in type(config.activation_checkpoint).__qualname__) == expected["full"]
    assert config.compile.enable
    if "convergence" in script:
        assert config.compile.components == ["model"]
        assert config.metrics.enable_tensorboard
    assert config.compile.enable_async_tensor_parallel == (expected["tensor"] > 1)
    if expected["pipeline"] > 1:
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
