"""Losses by how gradients are added: what each arm adds, and that the page shows what was measured."""

import json
from pathlib import Path

import pytest
import torch

from scripts.tables import gradient_losses
from scripts.tables.gradient_losses import ARMS, BASELINE, CONTROL, DATA, RANKS
from tests.data_sets import gaussian, generator
from tests.gradients import oracle

PAGE = (Path(__file__).parents[2] / "docs" / "measurements" / "gradients.md").read_text()
SHAPES = [(40, 24), (13, 130), (7,), (3, 5)]


@pytest.fixture(scope="module")
def gradients() -> list[list[torch.Tensor]]:
    rng = generator(5)
    return [[gaussian(shape, rng) * 2.0 ** gaussian(shape, rng) for shape in SHAPES] for _ in range(RANKS)]


def test_e4m3_has_the_bits_of_the_oracle(gradients):
    found = ARMS["e4m3"](gradients)
    for ours, each in zip(found, zip(*gradients, strict=True), strict=True):
        assert torch.equal(ours + 0.0, oracle.summed(each, factor=1.0) + 0.0)


def test_the_page_shows_what_was_measured():
    data = json.loads(DATA.read_text())
    assert data["held_out"].keys() == data["mean_training_loss"].keys() == ARMS.keys()
    table = gradient_losses.table(data).markdown()
    assert f"<!-- begin gradient_losses -->\n{table}\n\n<sub>`{data['command']}`" in PAGE


def test_rounding_to_e4m3_is_within_noise_and_the_control_is_not():
    """0.25 % and two standard errors; the control is worse by more than its interval, in every run."""
    held_out = json.loads(DATA.read_text())["held_out"]
    for arm in ("bf16 ring", "e4m3", "e4m3, stochastic"):
        mean, half = gradient_losses.gap(held_out[arm], held_out[BASELINE])
        assert abs(mean) + half < 0.25
    mean, half = gradient_losses.gap(held_out[CONTROL], held_out[BASELINE])
    assert mean - half > 1
    assert all(a > b for a, b in zip(held_out[CONTROL], held_out[BASELINE], strict=True))


def test_a_run(monkeypatch, tmp_path):
    """Two steps: all arms begin with the same loss; what a file has is not trained again."""
    pytest.importorskip("transformers")
    for name, value in {
        "STEPS": 2,
        "HELD_OUT": 32,
        "DECIBELS_EVERY": 1,
        "ARMS": dict(list(ARMS.items())[::5]),
    }.items():
        monkeypatch.setattr(gradient_losses, name, value)
    file = tmp_path / "runs.jsonl"
    found = gradient_losses.record(file, 1)
    runs = [json.loads(line) for line in file.read_text().splitlines()]
    assert [run["arm"] for run in runs] == [BASELINE, CONTROL]
    assert runs[0]["losses"][0] == runs[1]["losses"][0] == pytest.approx(5.54, abs=0.05)
    monkeypatch.setattr(gradient_losses, "train", None)
    assert gradient_losses.record(file, 1) == found
