"""The benchmark of torchtitan 0.3 runs its arms one after another, and names those that fail."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from scripts.bench import titan_0_3
from tests.integrations.torchtitan import runs
from tests.processes import PYTHONPATH

LLAMA = ("--flavor", "debugmodel", "--config", "llama3_debugmodel")
QWEN = ("--model", "qwen3", "--flavor", "debugmodel_moe", "--config", "qwen3_moe_debug")
SCOUT = ("--model", "llama4", "--flavor", "debugmodel", "--config", "llama4_debugmodel", "--layers", "2")
DEEPSEEK = (
    "--model",
    "deepseek_v3",
    "--flavor",
    "small",
    "--config",
    "deepseek_v3_debugmodel",
    "--layers",
    "2",
)
ON_RANKS = "--experts", "16", "--experts-on", "2"
SHORT = ("--tokens", "128", "--sequences", "2", "--skip", "1", "--steps", "1")
FAILS = 'f8sub:{"recipe_name":"none"}'
CASES = [
    ((*LLAMA, "--no-compile"), "selective", "2 dense"),
    ((*QWEN, "--no-compile"), "full", "2 of 8 experts"),
    (SCOUT, "selective", "2 of 8 experts"),
    (DEEPSEEK, "full", "1 dense, 1 of 32 experts"),
    ((*DEEPSEEK, *ON_RANKS), "selective", "1 dense, 1 of 16 experts"),
]


def layer(experts: int) -> types.SimpleNamespace:
    """A layer's config, as far as it is looked at; without experts for none."""
    if not experts:
        return types.SimpleNamespace(moe=None)
    parts = {
        name: types.SimpleNamespace(num_experts=experts) for name in ("inner_experts", "token_dispatcher")
    }
    gate = types.SimpleNamespace(out_features=experts)
    router = types.SimpleNamespace(num_experts=experts, gate=gate)
    routed = types.SimpleNamespace(**parts)
    return types.SimpleNamespace(
        moe=types.SimpleNamespace(num_experts=experts, router=router, routed_experts=routed)
    )


@pytest.mark.parametrize(
    ("experts", "number", "found"),
    [
        ([0, 0, 0, 8, 8, 8], 2, "1 dense, 1 of 8 experts"),
        ([0, 0, 0, 8, 8, 8], 1, "1 dense"),
        ([0, 0, 0, 8, 8, 8], 9, "1 dense, 3 of 8 experts"),
        ([0, 8, 0, 8], 3, "2 dense, 1 of 8 experts"),
        ([8, 8, 8], 2, "2 of 8 experts"),
        ([0, 0, 0], 2, "2 dense"),
    ],
)
def test_of_leading_dense_layers_one_is_left(experts: list[int], number: int, found: str):
    layers = [layer(each) for each in experts]
    titan_0_3.cut(layers, number)
    assert titan_0_3.layers_in_words(layers) == found


def on_cpus(folder: Path, processes: int, *options: str) -> subprocess.CompletedProcess[str]:
    """The benchmark as torchrun runs it."""
    by = sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)
    return subprocess.run(
        [*by, "-m", "tests.scripts.titan_0_3_on_cpus", *SHORT, *options],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder)},
        check=False,
    )


of_0_3 = pytest.mark.skipif(
    runs.installed() != "0.3", reason=f"of torchtitan 0.3, here is {runs.installed()}"
)


@pytest.mark.long
@of_0_3
@pytest.mark.parametrize(("model", "checkpoints", "layers"), CASES)
def test_it_trains_on_cpus(tmp_path: Path, model: tuple[str, ...], checkpoints: str, layers: str):
    figures = tmp_path / "figures.json"
    ours = 'f8sub:{"emulate":true,"experts":true}'
    arms = "bf16", ours, FAILS
    done = on_cpus(tmp_path, 2, *model, "--ac", checkpoints, "--json", str(figures), *arms)
    assert done.returncode == 0, done.stderr[-3000:]
    bf16, f8sub, failed = (json.loads(line) for line in figures.read_text().splitlines())
    assert (bf16["arm"], f8sub["arm"]) == ("bf16", ours)
    assert {bf16["layers"], f8sub["layers"]} == {layers}
    assert f8sub["over_bf16"] == pytest.approx(bf16["step_ms"] / f8sub["step_ms"])
    assert bf16["tokens_per_second"] == pytest.approx(256e3 / bf16["step_ms"])
    assert 0 < abs(f8sub["loss"] - bf16["loss"]) < 0.05
    assert "none" in failed["error"]


@pytest.mark.long
@of_0_3
def test_it_fails_where_no_arm_runs(tmp_path: Path):
    done = on_cpus(tmp_path, 1, *LLAMA, FAILS)
    assert done.returncode == 1
    assert "none" in done.stdout
    assert "no arm ran" in done.stderr
