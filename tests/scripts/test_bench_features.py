"""The GPU benchmark of experts and of a monitor, where there is no GPU."""

import pytest
import torch

from f8sub import get_recipe
from scripts.bench.gpu import monitors
from scripts.bench.gpu.expert_steps import Lie
from scripts.bench.gpu.experts import FLOOR_DB, Problem, Product
from tests.scripts.test_bench_gpu import CPU, session


def test_a_grouped_product_that_is_wrong_is_not_timed():
    """By groups that lie elsewhere."""
    problem = Problem("fprop", (4, 32, 64, 96), Lie.of("balanced", 4, 96))
    torch.manual_seed(0)
    product = Product(problem, get_recipe("rowwise").fprop, "dequantize", problem.lie.groups(CPU))
    a, b = product.operands(*problem.given(CPU))
    assert product.sqnr((a, b)) > FLOOR_DB - 10
    product.groups = product.groups._replace(ends=product.groups.ends - 16)
    with pytest.raises(RuntimeError, match="dB of its operands' product"):
        product.sqnr((a, b))


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
