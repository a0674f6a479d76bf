"""The harness itself: it must report, never hang."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.dist.ranks import RankFailure


def _sum_of_ranks(rank: int, world: int) -> tuple[int, float, int]:
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    weight = torch.ones(4, requires_grad=True)
    (weight * 2).sum().backward()
    return os.getpid(), total.item(), torch.get_num_threads()


@pytest.mark.parametrize("world", [1, 2, 7], ids="world{}".format)
def test_results_come_back_in_the_order_of_the_ranks(ranks, world):
    pids, totals, threads = zip(*ranks(world, _sum_of_ranks), strict=True)
    assert len(set(pids)) == world
    assert totals == (world * (world - 1) / 2,) * world
    assert threads == (1,) * world


def _rank_one_fails(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("rank one has a reason")


def test_a_failure_names_the_rank_and_its_reason(ranks):
    with pytest.raises(RankFailure, match=r"(?s)1 of 3 ranks failed.*rank 1: .*rank one has a reason"):
        ranks(3, _rank_one_fails)


def _rank_one_dies(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(3)


def test_a_rank_that_dies_is_reported(ranks):
    with pytest.raises(RankFailure, match="rank 1: died without an answer"):
        ranks(2, _rank_one_dies)


def _sleeps(rank: int, world: int) -> None:
    time.sleep(30 * rank)


def test_a_rank_that_hangs_is_killed_and_shows_where_it_stood(ranks):
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)rank 1: no answer within 2 s; killed.*in _sleeps"):
        ranks(2, _sleeps, timeout=2.0)
    assert time.monotonic() - start < 10


def _big(rank: int, world: int, data: torch.Tensor) -> torch.Tensor:
    return data + rank


def test_large_arguments_and_results_pass(ranks):
    data = torch.arange(1 << 20, dtype=torch.float32)
    first, second = ranks(2, _big, data)
    assert torch.equal(first, data)
    assert torch.equal(second, data + 1)
