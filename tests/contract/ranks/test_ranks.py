"""The harness itself: it must report, never hang."""

import datetime
import faulthandler
import gc
import importlib
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from f8sub.weights import agreement
from tests import ranks as harness
from tests.ranks import RankFailure


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


def test_a_test_of_a_rank_runs_on_the_ranks(rank, world):
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world)


def _impatient(rank: int, world: int) -> float:
    found, agreement.PATIENCE = agreement.PATIENCE, datetime.timedelta(milliseconds=1)
    return found.total_seconds()


def test_ranks_wait_for_each_other_whatever_an_earlier_test_set(ranks):
    assert [ranks(2, _impatient, timeout=80.0) for _ in range(2)] == [[40.0, 40.0]] * 2


def _stops_collecting(rank: int, world: int) -> bool:
    was_on = gc.isenabled()
    gc.disable()
    return was_on


def test_ranks_collect_garbage_whatever_an_earlier_test_set(ranks):
    assert [ranks(2, _stops_collecting) for _ in range(2)] == [[True, True]] * 2


def _rank_one(rank: int, world: int, how: str) -> None:
    if rank == 1 and how == "fails":
        raise ValueError("rank one has a reason")
    if rank == 1 and how == "dies":
        os._exit(3)
    if rank == 1:
        faulthandler.dump_traceback(file=2)
        print("after it showed where it stood", flush=True)
        time.sleep(600)


FAILURES = {
    "fails": "1 of 3 ranks failed.*rank 1: .*rank one has a reason",
    "dies": "rank 1: died without an answer",
    "hangs": "rank 1: no answer within 3 s; killed.*in _rank_one.*after it showed where it stood",
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_names_the_rank_and_its_reason_and_a_rank_that_hangs_is_killed(ranks, how):
    with pytest.raises(RankFailure, match=f"(?s){FAILURES[how]}"):
        ranks(3, _rank_one, how, timeout=3.0)


def test_what_a_nursery_has_not_imported_is_imported_by_ranks(tmp_path, monkeypatch):
    nursery = harness.Nursery.start()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "late_body.py").write_text("def body(rank, world, more):\n    return rank + more\n")
    assert nursery.run(2, importlib.import_module("late_body").body, 5) == [5, 6]
    nursery.stop()


def test_a_nursery_that_does_not_answer_is_a_failure(monkeypatch):
    monkeypatch.setattr(harness, "ANSWERED_WITHIN", 0.5)
    nursery = harness.Nursery.start()
    os.kill(nursery.pid, signal.SIGSTOP)
    for _ in range(2):
        with pytest.raises(RankFailure, match="_sum_of_ranks: the process that forks ranks does not answer"):
            nursery.run(1, _sum_of_ranks, timeout=0.5)
    nursery.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(nursery.pid, 0)
