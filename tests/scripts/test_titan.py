"""The benchmark of torchtitan runs to its end on CPUs, reads what torchtitan logged, and tells what failed."""

import argparse
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from scripts.bench import titan
from tests.integrations.torchtitan import runs

SMALL = ("--flavor", "debugmodel", "--tokens", "128", "--sequences", "2")
SHORT = ("--steps", "6", "--skip", "2", "--window", "2")
of_0_2 = pytest.mark.skipif(
    runs.installed() != "0.2",
    reason=f"of torchtitan 0.2, here is {runs.installed()}: scripts/test_versions.sh has a row of each",
)


def test_figures_are_medians_over_what_follows_the_first_steps(tmp_path):
    writer = SummaryWriter(tmp_path / "tb" / "run")
    for step, value in ((1, 5.0), (2, 1e6), (4, 10.0), (6, 30.0), (8, 80.0)):
        for tag in titan.METRICS.values():
            writer.add_scalar(tag, value, step)
    writer.close()
    found = titan.figures_of(tmp_path, skip=2)
    losses = {1: 5.0, 2: 1e6, 4: 10.0, 6: 30.0, 8: 80.0}
    ends = {"first_loss": 5.0, "loss": 80.0, "loss_step": 8}
    speeds = {"slowest": 10.0, "fastest": 80.0}
    assert found == {**dict.fromkeys(titan.METRICS, 30.0), **ends, **speeds, "losses": losses}
    with pytest.raises(ValueError, match="after step 8"):
        titan.figures_of(tmp_path, skip=8)


def test_arms_differ_in_what_they_are_about():
    options = argparse.Namespace(
        gpus=2, program="torchtitan.train", flavor="8B", tokens=8192, sequences=1, steps=25, window=5, more=[]
    )
    control, ours = (
        set(titan.command(options, arm, Path("there")))
        for arm in ("bf16 compiled", "f8sub tensorwise compiled")
    )
    assert ours - control == {*titan.F8SUB, "--metrics.save_tb_folder=f8sub_tensorwise_compiled"}
    assert control - ours == {"--metrics.save_tb_folder=bf16_compiled"}


@pytest.mark.long
@of_0_2
def test_it_trains_on_cpus(run_script):
    on_cpus = ("--gpus", "2", "--program", "tests.integrations.torchtitan.cpu_0_2", "--f8sub.emulate")
    arms = ("--arms", "f8sub tensorwise eager", "bf16 eager")  # the latter has no such option
    done = run_script("bench/titan.py", *on_cpus, *SMALL, *SHORT, *arms)
    assert done.returncode == 1
    assert list(done.figures["figures"]) == ["f8sub tensorwise eager"]
    assert done.figures["figures"]["f8sub tensorwise eager"]["tokens_per_second"] > 0
    assert 7 < done.figures["figures"]["f8sub tensorwise eager"]["loss"] < 9
    assert "Unrecognized options: --f8sub.emulate" in done.figures["failed"]["bf16 eager"]


@pytest.mark.long
@of_0_2
def test_a_mixture_of_experts_on_cpus(run_script):
    on_cpus = ("--gpus", "2", "--program", "tests.integrations.torchtitan.cpu_0_2", "--f8sub.emulate")
    model = ("--model.name=qwen3", "--model.flavor=debugmodel_moe", "--compile.no-enable")
    done = run_script("bench/titan.py", *on_cpus, *SMALL, *SHORT, *model, "--arms", titan.MIXTURES[0])
    assert done.returncode == 0
    assert 7 < done.figures["figures"][titan.MIXTURES[0]]["loss"] < 9
