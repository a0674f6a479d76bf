"""Our products by groups, interpreted on the CPU, against float64: every pair of scales, any lie of groups."""

import pytest
import torch

from tests.budgets import excess
from tests.kernels.grouped import GROUPS, PAIRS, ByRows, OverRows

SHAPES = {"whole": (128, 256), "ragged": (80, 144)}
"""N and K that tiles divide, and that they do not."""

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
on_each_pair = pytest.mark.parametrize("pair", PAIRS)
on_each_lie = pytest.mark.parametrize("counts", GROUPS.values(), ids=list(GROUPS))


def ran(launches: list, out: torch.Tensor) -> torch.Tensor:
    """All launches, over a result and a table that hold what must not be left there."""
    out.view(torch.uint8).fill_(0x7F)
    launches[0].arguments["table_ptr"].fill_(1 << 20)
    for launch in launches:
        launch.run()
    return out


def config(**changes: int):
    from f8sub.kernels.triton.grouped_gemm_config import Config

    return Config(**{"rows": 64, "cols": 64, "stages": 3, "group": 2, **changes})


def by_rows(case: ByRows, dtype: torch.dtype, fast: bool = False, **changes: int) -> torch.Tensor:
    from f8sub.kernels.triton.grouped_gemm_launch import product_by_rows

    return ran(*product_by_rows(*case.operands(), dtype, fast, config(**changes), 5))


def over_rows(case: OverRows, dtype: torch.dtype, fast: bool = False, **changes: int) -> torch.Tensor:
    from f8sub.kernels.triton.grouped_gemm_launch import product_over_rows

    return ran(*product_over_rows(*case.operands(), dtype, fast, config(**changes), 5))


def check_rows(pair: str, counts: list[int], shape: tuple[int, int], dtype=torch.float32, **how) -> None:
    case = ByRows(PAIRS[pair], counts, *shape)
    *found, past = case.split(by_rows(case, dtype, **how))
    assert not past.any()
    for part, right in zip(found, case.groups_right(), strict=True):
        assert excess(part, right) <= 1


def check_sums(pair: str, counts: list[int], shape: tuple[int, int], dtype=torch.float32, **how) -> None:
    case = OverRows(PAIRS[pair], counts, *shape)
    found = over_rows(case, dtype, **how)
    assert found.shape == (len(counts), *shape)
    for part, right in zip(found, case.groups_right(), strict=True):
        assert excess(part, right) <= 1 if right is not None else not part.any()


@on_each_lie
@on_each_pair
def test_rows_by_the_matrix_of_their_group(interpreter, pair, counts):
    interpreter(check_rows, pair, counts, SHAPES["ragged"])


@on_each_lie
@on_each_pair
def test_sums_over_the_rows_of_each_group(interpreter, pair, counts):
    interpreter(check_sums, pair, counts, SHAPES["ragged"])
