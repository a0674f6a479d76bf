"""The comparison of losses: its statistics against known ones, and that finished runs are kept."""

import json
import math

import pytest
import torch

from scripts import loss_compare
from scripts.loss_compare import Results, Run


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.7062), (2, 4.3027), (4, 2.7764), (18, 2.1009), (60, 2.0003)]
)
def test_quantiles_of_students_t(degrees, quantile):
    """Against the table of any textbook."""
    assert loss_compare.student_t_quantile(0.975, degrees) == pytest.approx(quantile, abs=1e-4)


def test_a_gap_is_relative_and_seeds_cancel():
    base = [2.0, 3.0, 2.5]
    losses = {"bf16": base, "float32": base, "worse": [1.01 * loss for loss in base]}
    found = loss_compare.gaps(losses)
    assert set(found) == {"float32", "worse"}
    assert found["worse"]["gap_percent"] == pytest.approx(100 * math.log(1.01))
    assert found["float32"]["gap_percent"] == pytest.approx(0)
    assert found["worse"]["half_width_percent"] == pytest.approx(0, abs=1e-9)


def test_two_arms_are_a_paired_t_interval():
    """With one arm beside bf16, the block design is the paired t-test."""
    differences = torch.tensor([0.4, -0.2, 0.7], dtype=torch.float64)
    base = torch.tensor([2.0, 3.0, 2.5], dtype=torch.float64)
    other = base * (differences / 100).exp()
    found = loss_compare.gaps({"bf16": base.tolist(), "other": other.tolist()})["other"]
    assert found["gap_percent"] == pytest.approx(0.3)
    assert found["half_width_percent"] == pytest.approx(
        4.30265 * differences.std().item() / math.sqrt(3), rel=1e-5
    )


def test_the_interval_holds_the_true_gap_as_often_as_it_says():
    rng = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(300):
        noise = 0.003 * torch.randn((4, 3), generator=rng, dtype=torch.float64)
        losses = (0.9 + torch.randn(3, generator=rng, dtype=torch.float64) / 10 + noise).exp()
        losses[3] *= math.exp(0.005)
        found = loss_compare.gaps(dict(zip(["bf16", "a", "b", "worse"], losses.tolist(), strict=True)))[
            "worse"
        ]
        held += abs(found["gap_percent"] - 0.5) <= found["half_width_percent"]
    assert 0.91 * 300 <= held <= 0.985 * 300


def test_one_seed_has_no_interval():
    found = loss_compare.gaps({"bf16": [2.0], "other": [2.1]})["other"]
    assert found == {"gap_percent": pytest.approx(100 * math.log(1.05)), "half_width_percent": None}
    assert loss_compare.interval(found) == "+4.88 %"


def test_arms_differ_in_precision_alone():
    def options(arm: str) -> dict[str, str]:
        words = loss_compare.settings(Run(arm, 1), 10)
        return dict(zip(words[::2], words[1::2], strict=True))

    precision = {"--float8.enabled", "--float8.recipe", "--training.dtype"}
    same = [
        {k: v for k, v in options(arm).items() if k not in precision}
        for arm in ("bf16", "float32", "rowwise")
    ]
    assert same[0] == same[1] == same[2]
    assert options("rowwise")["--float8.recipe"] == "rowwise"
    assert options("bf16")["--float8.enabled"] == options("float32")["--float8.enabled"] == "false"


def test_a_finished_run_counts_only_with_the_settings_it_had(tmp_path):
    run = Run("rowwise", 0)
    kept = {"settings": loss_compare.settings(run, 10), "eval_loss": 2.0, "losses": [], "seconds": 1.0}
    (tmp_path / "rowwise-seed0.json").write_text(json.dumps(kept))
    assert Results(tmp_path, 10).load(run) == kept
    assert Results(tmp_path, 11).load(run) is None
    assert Results(tmp_path, 10).load(Run("rowwise", 1)) is None


@pytest.mark.long
def test_a_run_that_fails_says_why_and_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(loss_compare, "settings", lambda run, steps: ["--training.steps", "none"])
    results = Results(tmp_path, 1)
    stopped = tmp_path / "rowwise-seed0" / "checkpoints"
    (stopped / "step-00000001").mkdir(parents=True)
    with pytest.raises(RuntimeError, match=r"rowwise, seed 0.*pretrain\.py(.|\n)*training\.steps"):
        results.train(Run("rowwise", 0), lambda step: None)
    assert results.load(Run("rowwise", 0)) is None
    assert not stopped.exists()


@pytest.mark.long
def test_trains_each_arm_once_and_shows_the_gaps(tmp_path, run_script):
    def run():
        options = ("--recipes", "rowwise", "--seeds", "0", "--steps", "2", "--folder", tmp_path)
        finished = run_script("loss_compare.py", *options, OMP_NUM_THREADS="1")
        assert finished.returncode == 0, finished.stderr[-3000:]
        return finished

    assert "rowwise, seed 0" in run().stdout
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*-seed?.json")}
    assert len(written) == 3
    again = run()
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert set(again.figures["gaps"]) == {"float32", "rowwise"}
    assert all(len(losses) == 1 for losses in again.figures["eval_losses"].values())
    assert loss_compare.interval(again.figures["gaps"]["rowwise"]) in again.stdout
    assert (tmp_path / "loss.png").stat().st_size > 1000
