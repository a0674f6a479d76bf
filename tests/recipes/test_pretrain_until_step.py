"""The last steps of a run in bf16: those of a run that is resumed without float8, to the bit."""

import contextlib
import io
import json
import weakref
from pathlib import Path

import pretrain
import pytest
import torch
from f8sub_pretrain.checkpoint import Checkpoints
from f8sub_pretrain.compare import compare
from f8sub_pretrain.metrics import Metrics, read_metrics
from f8sub_pretrain.model import build_model
from f8sub_pretrain.settings import SettingsError, parse

from tests.graphs.tape import imitate
from tests.recipes.runs import changed, quick_settings, records, trainer
from tests.selection import long_but

UNTIL = "--float8.until_step 2 --checkpoint.interval 1"
ALL_OF_FLOAT8 = (
    "--float8.recipe delayed --float8.attention float8 --float8.gradients true "
    "--float8.keep_swiglu_input float8 --float8.monitor_every 1"
)
WAYS = [
    ALL_OF_FLOAT8,
    "--compile.cuda_graph true --optimizer.one_pass true --training.steps 8 --float8.until_step 6",
    "--compile.enabled true --activation_checkpoint.mode full",
    "--model.size moe-debug --float8.experts true",
    "--training.dtype float16",
    "--float8.enabled false --float8.gradients true",
]


def trained(rank, world, settings):
    """Lines that the run printed, whether each of its models was in float8, and what of one outlived it."""
    said, built, alive, old = [], [], [], []

    def build(settings, *given):
        alive.extend(type(each()).__name__ for each in old if each() is not None)
        built.append(settings.uses_float8)
        return build_model(settings, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Metrics, "say", lambda self, line: said.append(line))
        patch.setattr(pretrain, "build_model", build)
        if settings.compile.cuda_graph is True:
            imitate(patch)
        made = trainer(world, settings)
        old = [weakref.ref(each) for each in (made.optimizer, *made.model.modules())]
        batch = made.batch
        # As dropout would, in every step.
        made.batch = lambda data: (batch(data), torch.rand(()))[0]
        assert made.run()
    return said, built, alive


def last_state(settings):
    """The files of the last checkpoint's tensors: weights, optimizer states and random states."""
    folder = Path(settings.job.dump_folder) / "checkpoints" / f"step-{settings.training.steps:08d}"
    return {path.name: path.read_bytes() for path in folder.glob("*.distcp")}


def numbers(settings):
    """Those of each step that no clock has a part in."""
    timed = {"time", "tokens_per_second", "memory"}
    return [{key: value for key, value in row.items() if key not in timed} for row in records(settings)]


@pytest.mark.parametrize("options", long_but(WAYS[:1], WAYS))
def test_the_last_steps_are_those_of_a_run_resumed_without_float8(ranks, tmp_path, options):
    settings = quick_settings(tmp_path, f"{UNTIL} {options}")
    until, steps = settings.float8.until_step, settings.training.steps
    for said, built, alive in ranks(2, trained, settings):
        assert built == [True, False]
        assert not alive  # when the second one was made
        assert said.count(f"From step {until + 1} on in {settings.training.dtype}.") == 1
    found, state = numbers(settings), last_state(settings)
    assert len(state) == 2
    plain = changed(settings, "float8", enabled=False, gradients=False, until_step=0)
    plain = changed(plain, "checkpoint", resume=f"step-{until:08d}")
    assert [built for _, built, _ in ranks(2, trained, plain)] == [[False]] * 2
    assert [row["step"] for row in found] == list(range(1, steps + 1))
    assert numbers(plain) == found
    assert last_state(plain) == state


def test_a_run_is_resumed_before_and_after_the_switch(ranks, tmp_path):
    options = f"{UNTIL} --float8.monitor_every 1 --metrics.log_interval 1"
    settings = quick_settings(tmp_path, options)
    (whole,) = ranks(1, trained, settings)
    assert whole[1] == [True, False]
    titles = [line.partition("  ")[0] for line in whole[0] if "tokens/s" in line]
    assert titles == ["test", "test", "test until step 2", "test until step 2"]
    (switch,) = (number for number, line in enumerate(whole[0]) if line == "From step 3 on in bfloat16.")
    assert ["step 2/4" in line for line in whole[0]].index(True) < switch
    found, state = numbers(settings), last_state(settings)
    for step, models in ((1, [True, False]), (2, [False]), (3, [False])):
        resumed = changed(settings, "checkpoint", resume=f"step-{step:08d}")
        ((said, built, _),) = ranks(1, trained, resumed)
        assert built == models
        assert said.count("From step 3 on in bfloat16.") == models.count(True)
        assert said[0].startswith("test: " if True in models else "test until step 2: ")
        assert ("float8: off" in said[0]) is (True not in models)
        assert numbers(settings) == found
        assert last_state(settings) == state
    rows = read_metrics(tmp_path / "numerics.jsonl")
    assert sorted({row["step"] for row in rows}) == [1, 2]
    assert (tmp_path / "numerics_x.png").exists()


def steps_of_states(rank, world, settings):
    """How many steps the states of each parameter have seen."""
    made = trainer(world, settings)
    assert made.run()
    return [made.optimizer.state[parameter]["step"].item() for parameter in made.model.parameters()]


def test_an_evaluation_before_the_switch_leaves_the_states_where_they_are_found(ranks, tmp_path):
    """No checkpoint of that step has the model sharded again."""
    options = "--float8.until_step 2 --eval.interval 2 --training.reshard_after_forward false"
    (steps,) = ranks(1, steps_of_states, quick_settings(tmp_path, options))
    assert set(steps) == {4}


@pytest.mark.parametrize(("name", "step"), [("step-00000120", 120), ("best", 0), ("step-", 0)])
def test_the_step_of_a_checkpoint(name, step):
    assert Checkpoints.step_of(name) == step


def compared(rank, world, settings):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        compare(settings, lambda one, title: trainer(world, one, title).run())
    return printed.getvalue()


def test_a_comparison_says_which_steps_were_in_float8(ranks, tmp_path):
    settings = quick_settings(tmp_path, "--compare bf16 --float8.until_step 2 --training.steps 5")
    printed = ranks(2, compared, settings)[0]
    float8, bf16 = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("tensorwise", "bf16"))
    shares = [
        ours["all_gather_bytes"] / of["all_gather_bytes"] for ours, of in zip(float8, bf16, strict=True)
    ]
    assert max(shares[:2]) < 0.6
    assert shares[2:] == [1, 1, 1]
    assert [row["amax_all_reduces"] for row in float8] == [1, 1, 0, 0, 0]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["run"]["until_step"] == 2
    # Means without the first step: one step in float8, and three in bf16.
    assert summary["runs"]["tensorwise"]["amax_all_reduces"] == 1 / 4
    assert f"It sent {(shares[1] + 3) / 4:.2f} of the weight bytes." in printed
    assert "5 steps, in float8 until step 2" in printed
    assert (tmp_path / "loss.png").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--float8.until_step -1", "float8.until_step = -1: must be at least 0"),
        ("--float8.until_step 9 --training.steps 9", "training.steps = 9 leaves no step after it"),
    ],
)
def test_a_step_that_ends_nothing_is_refused(option, message):
    with pytest.raises(SettingsError, match=message):
        parse(option.split())
    assert parse(["--float8.until_step", "8", "--training.steps", "9"]).float8.until_step == 8
