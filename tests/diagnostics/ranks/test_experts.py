"""Experts under FSDP2: rows of w are the unsharded model's, and no bit of a step is another."""

import torch

import f8sub
from tests.experts.ranks.test_experts_sharded import converted, sharded, trained
from tests.models import equal


def test_rows_of_w_are_the_unsharded_models(rank, world):
    experts = 3
    expected = trained(sharded(converted(experts, "rowwise")), experts)
    model = sharded(converted(experts, "rowwise"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = f8sub.Monitor(model, every=2, layers="experts.*")
    detach = monitor.attach(optimizer)
    found = trained(model, experts, optimizer=optimizer)
    detach()
    monitor.flush()
    whole = converted(experts, "rowwise")
    alone = f8sub.Monitor(
        whole, every=2, layers="experts.*"
    )  # each rank has all, so that shares are the same
    detach = alone.attach(optimizer := torch.optim.AdamW(whole.parameters(), lr=1e-2))
    trained(whole, experts, optimizer=optimizer)
    detach()
    alone.flush()
    of_w = [[row[3:] for row in each.rows if row.role == "w" and row.step == 0] for each in (monitor, alone)]
    is_same, found, expected = equal(found, expected), *of_w
    assert is_same
    assert len(found) == 3
    assert all(a == b for a, b in zip(found, expected, strict=True)), (found, expected)
