"""Damaged checkpoints are refused or load right; what scripts/tables/corruption.py counts 10,000 of."""

from pathlib import Path

import pytest
from f8sub_pretrain.checkpoint import Checkpoints

from scripts.tables import corruption


def outcomes(rank: int, world: int, folder: str, count: int, blind: bool) -> dict[str, int]:
    with pytest.MonkeyPatch.context() as patch:
        if blind:
            patch.setattr(Checkpoints, "problem", lambda self, name: "")
        found = corruption.of_checkpoints(Path(folder), count, seed=1)
    outcomes = {outcome for of in found.values() for outcome in of}
    return {outcome: sum(of.get(outcome, 0) for of in found.values()) for outcome in outcomes}


def test_each_of_600_damages_is_refused_clearly_or_loads_right(ranks, tmp_path):
    (found,) = ranks(1, outcomes, str(tmp_path), 600, False)
    assert sum(found.values()) == 600
    assert set(found) <= {corruption.REFUSED, corruption.RIGHT}
    assert found[corruption.REFUSED] > 590


def test_it_would_see_one_that_is_neither(ranks, tmp_path):
    (found,) = ranks(1, outcomes, str(tmp_path), 120, True)
    assert found[corruption.WRONG] > 10
