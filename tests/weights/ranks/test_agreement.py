"""Agreements over the store: the same answer on every rank, and no key that stays."""

import datetime
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import f8sub
from f8sub.weights import agreement
from tests.data_sets import gaussian, generator
from tests.models import Stack, seed_weights, shard

WORLD, POINTS = 4, 25


def tcp(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def stores(kind: str, folder: Path) -> list[dist.Store]:
    """A store of the same keys for each of the ranks, and the server where there is one."""
    if kind == "hash":
        return [dist.HashStore()] * WORLD
    if kind == "prefix":
        of_all = dist.HashStore()
        return [dist.PrefixStore("a", dist.PrefixStore("b", of_all)) for _ in range(WORLD)]
    if kind == "file":
        return [dist.FileStore(str(folder / "store"), WORLD) for _ in range(WORLD)]
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [*(tcp(server.port) for _ in range(WORLD)), server]


@pytest.fixture(params=["hash", "prefix", "file", "tcp"])
def on_ranks(request, tmp_path, monkeypatch) -> Callable[..., tuple[list[Any], int]]:
    """``on_ranks(body)``: what ``body(rank)`` returns on threads with a store each, and the keys that it left."""
    of_rank = stores(request.param, tmp_path)
    here = threading.local()
    monkeypatch.setattr(agreement, "default_store", lambda: here.store)
    monkeypatch.setattr(agreement, "_left_behind", type(agreement._left_behind)())

    def run(body: Callable[[int], Any]) -> tuple[list[Any], int]:
        def on_rank(rank: int) -> Any:
            here.store = of_rank[rank]
            return body(rank)

        before = of_rank[0].num_keys()
        with ThreadPoolExecutor(WORLD) as pool:
            found = list(pool.map(on_rank, range(WORLD)))
        return found, of_rank[0].num_keys() - before

    return run


def test_ranks_that_all_come(on_ranks):
    answers, kept = on_ranks(lambda rank: [agreement.all_arrive(f"p/{i}", WORLD) for i in range(POINTS)])
    assert answers == [[True] * POINTS] * WORLD
    assert kept == 0


def test_the_first_offer_that_all_bring(on_ranks):
    """Rank r lacks offer r; the ranks come to the points one after the other, none waits at a barrier."""
    offers = [str(i) for i in range(WORLD + 2)]

    def body(rank: int) -> list[str | None]:
        mine = offers[:rank] + offers[rank + 1 :]
        found = [agreement.first_common(f"q/{i}", mine, WORLD) for i in range(POINTS)]
        return [*found, agreement.first_common("none", [str(rank)], WORLD)]

    answers, kept = on_ranks(body)
    assert answers == [[str(WORLD)] * POINTS + [None]] * WORLD
    assert kept == 0


@pytest.mark.parametrize("silent", [None, 2])
def test_ranks_that_tell_before_a_collective(on_ranks, silent):
    collective = threading.Barrier(WORLD)

    def body(rank: int) -> list[bool]:
        found = []
        for i in range(POINTS):
            tells = rank != silent or i % 2
            if tells:
                agreement.tell(f"t/{i}")
            collective.wait()
            if tells:
                found.append(agreement.all_told(f"t/{i}", WORLD))
        return found

    answers, kept = on_ranks(body)
    for rank, found in enumerate(answers):
        told = [silent is None or bool(i % 2) for i in range(POINTS)]
        assert found == ([True] * sum(told) if rank == silent else told)
    assert kept == 0


def test_ranks_that_come_late_find_the_decision_and_delete_it(on_ranks, monkeypatch):
    monkeypatch.setattr(agreement, "PATIENCE", datetime.timedelta(milliseconds=1))
    early = threading.Barrier(WORLD)

    def body(rank: int) -> bool:
        if rank:
            early.wait()
        found = agreement.all_arrive("late", WORLD)
        if not rank:
            early.wait()
        return found

    answers, kept = on_ranks(body)
    assert answers == [False] * WORLD
    assert kept == 0


@pytest.mark.parametrize("on_ranks", ["hash"], indirect=True)  # others are slow to time out
def test_a_rank_that_always_comes_alone_leaves_few_keys(on_ranks, monkeypatch):
    monkeypatch.setattr(agreement, "PATIENCE", datetime.timedelta(milliseconds=1))

    def alone(name: str) -> Callable[[int], Any]:
        return lambda rank: (
            None if rank else [agreement.all_arrive(f"{name}/{i}", WORLD) for i in range(POINTS)]
        )

    _, kept = on_ranks(alone("a"))
    answers, more = on_ranks(alone("b"))
    assert answers[0] == [False] * POINTS
    assert kept == 2 * agreement._REMEMBERED
    assert more == 0


STEPS, SETTLED = 6, 2


def keys_of_each_step(rank: int, world: int, recipe: str, precompute: bool) -> list[int]:
    """Keys in the store, under an optimizer that f8sub does not see."""
    store = dist.distributed_c10d._get_default_store()
    model = shard(f8sub.convert_to_float8(seed_weights(Stack(32, 48, 32)), recipe=recipe))
    found = []
    for step in range(STEPS):
        model(gaussian((4, 32), generator(step))).backward(gaussian((4, 32), generator(step + 9)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
        if precompute:
            f8sub.precompute_scales(model)
        dist.barrier()
        found.append(store.num_keys())
        dist.barrier()
    return found


@pytest.mark.parametrize("precompute", [True, False], ids=["precompute", "forgotten"])
@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_steps_that_f8sub_does_not_see_leave_no_keys(ranks, recipe, precompute):
    for found in ranks(3, keys_of_each_step, recipe, precompute):
        assert found[SETTLED:] == [found[SETTLED]] * (STEPS - SETTLED)
