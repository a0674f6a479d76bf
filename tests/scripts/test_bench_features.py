"""The GPU benchmark of experts and of a monitor, where there is no GPU."""

import pytest

from scripts.bench.gpu import monitors
from tests.scripts.test_bench_gpu import session


def test_a_monitors_cost_is_that_of_sampled_steps():
    given = session(only=["f8sub tensorwise eager"])
    monitors.group(given)
    assert not given.failed
    ((shape, rows),) = given.figures["monitor"].items()
    (row,) = rows.values()
    assert (shape, row["operands"]) == ("32x4", 3 * 4 * 7)
    plain, sampled = row["plain"]["median_ms"], row["sampled"]["median_ms"]
    assert row["share"] == pytest.approx((sampled - plain) / (100 * plain))
    assert len(given.tables) == 1
