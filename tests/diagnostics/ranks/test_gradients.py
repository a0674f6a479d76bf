"""Measured reductions of gradients as rows of a monitor."""

import json
import math

import torch

import f8sub
from f8sub.integrations.torchtitan.hooks import WANTED, reduce_from_first_forward
from tests.models import BF16, shard, train, transformer


def monitored(rank: int, world: int, folder: str) -> tuple[list, list[dict[str, float]]]:
    """Rows of five steps that are all told, two of them sampled, and the decibels behind each."""
    model = shard(transformer("rowwise"), BF16)
    reduction = f8sub.reduce_gradients_in_float8(model, measure=True, measure_every=3)
    monitor = f8sub.Monitor(model, every=4, to=f"{folder}/{rank}.jsonl")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    told = []
    for step in range(5):
        with monitor:
            train(model, rank + 10 * step, steps=1, optimizer=optimizer)
        told.append(reduction.decibels())
    monitor.flush()
    assert "gradient" not in monitor.worst(100)
    monitor.heatmap("gradient", f"{folder}/{rank}.svg", "sqnr")
    return [tuple(row) for row in monitor.rows if row.role == "gradient"], told


def test_each_measured_reduction_is_a_row_of_its_step(ranks, tmp_path):
    (rows, told), others = ranks(2, monitored, str(tmp_path))
    assert [row[:4] for row in rows] == [row[:4] for row in others[0]]
    assert sorted({row[0] for row in rows}) == [0, 3]
    assert {row[2:4] for row in rows} == {("gradient", "e4m3 1x128")}
    for step in (0, 3):
        found = {row[1]: row[-2] for row in rows if row[0] == step}
        right = {name or "(root)": value for name, value in told[step].items()}
        assert len(found) > 1
        assert found.keys() == right.keys()
        assert all(math.isclose(found[name], right[name], abs_tol=1e-9) for name in right)
    lines = [json.loads(line) for line in (tmp_path / "0.jsonl").read_text().splitlines()]
    written = [line for line in lines if line["role"] == "gradient"]
    assert len(written) == len(rows)
    assert all(line["amax"] is None and 29 < line["sqnr"] < 45 for line in written)
    assert not (tmp_path / "1.jsonl").exists()


def removed(rank: int, world: int) -> list:
    """Without the reduction, or without measuring, there are no such rows; two monitors both tell them."""
    model = shard(transformer("rowwise"), BF16)
    monitors = [f8sub.Monitor(model, every=100) for _ in range(2)]
    reduction = f8sub.reduce_gradients_in_float8(model, measure=True, measure_every=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    counts = []
    for change in (lambda: None, reduction.remove, lambda: f8sub.reduce_gradients_in_float8(model)):
        change()
        with monitors[0], monitors[1]:
            train(model, rank, steps=1, optimizer=optimizer)
        counts.append([sum(row.role == "gradient" for row in m.rows) for m in monitors if not m.flush()])
    return counts


def test_rows_end_with_the_reduction(ranks):
    first, *others = ranks(2, removed)[0]
    assert first[0] == first[1] > 1
    assert others == [first, first]


def in_torchtitan(rank: int, world: int) -> list[list[int]]:
    """What the option sets up at the first forward measures as often as the monitor that is wanted, or not at all."""
    found = []
    for wanted in ({WANTED: (2, "numerics.jsonl")}, {}):
        model = transformer("rowwise")
        for name, value in wanted.items():
            setattr(model, name, value)
        reduce_from_first_forward(model)
        model = shard(model, BF16)
        monitor = f8sub.Monitor(model, every=100)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(3):
            with monitor:
                train(model, rank, steps=1, optimizer=optimizer)
        monitor.flush()
        found.append(sorted({row.step for row in monitor.rows if row.role == "gradient"}))
    return found


def test_torchtitans_options_measure_for_the_monitor(ranks):
    assert ranks(2, in_torchtitan)[0] == [[0, 2], []]


def test_writers_tell_what_a_row_has():
    from f8sub.diagnostics import monitor, writers

    told: dict[str, float] = {}

    class Board:
        @staticmethod
        def add_scalar(name: str, value: float, step: int) -> None:
            told[name] = value

    rows = monitor.rows_of(
        7, ["layers.0"], "gradient", "e4m3 1x128", torch.tensor([[1000.0, 1.0]], dtype=torch.float64)
    )
    writers.tensorboard(Board)(7, rows)
    assert told == {"float8/gradient.sqnr/layers.0": 30.0}
