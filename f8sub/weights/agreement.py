"""Agreement of ranks without waiting: over the store on a point that all came to, and on process groups of f8sub's own.

[Note: points in the store] Nothing stays in the store. A point is counted in one key: every rank adds 1 when it comes
and ``_PASSED`` when it leaves, after it has read what it came for. So the rank whose count says that all left is the
last reader, and it alone deletes the keys.

[Note: process groups] A group is kept for the next user when its user is gone. It has one user at a time, because ranks
need not reduce two exchanges in one order. A rank that forgets ``precompute_scales`` reduces before its next
all-gather, when the others may have reduced the table of another model. On one group those all-reduces would be paired
wrongly.

A group is used again, because each one takes sockets and threads (gloo) or device memory (NCCL). It is not destroyed
with its user, because garbage is collected at other times on other ranks. ``new_group`` names a group by its ranks and
by how many groups the process has: those numbers would differ, and the next ``new_group`` would wait for ever.

The ranks agree over the store which group is free on all of them. One that a rank used more often than another is free
on none: its collectives no longer pair.
"""

import collections
import contextlib
import datetime
import gc
import hashlib
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from f8sub.torch_compat import default_store, is_alive, new_group

PATIENCE = datetime.timedelta(seconds=3)
"""How long a rank waits for the others before all of them do without."""

_PASSED = 1 << 32
"""What a rank adds to a count when it leaves; larger than any number of ranks."""

_REMEMBERED = 16
"""Points that not all ranks came to whose keys a rank leaves in the store, for those that come late."""

_left_behind: collections.deque[tuple[weakref.ref[Any], str]] = collections.deque()
"""Those points, each with its store."""


def all_arrive(point: str, world: int) -> bool:
    """Return whether all ``world`` ranks come to ``point``; every rank that comes gets the same answer.

    The last rank to arrive decides yes, the first to lose patience decides no, and the first decision stands. A rank
    that comes later finds it decided. One that comes so late that the decision was deleted waits, and decides no again:
    those who deleted it do not come a second time. ``point`` is a name that the ranks share and used for no other
    decision.
    """
    store, arrived, decision = default_store(), f"{point}/arrived", f"{point}/decision"
    if store.add(arrived, 1) % _PASSED == world:
        # The last to arrive. compare_set writes only where nothing stands, and returns what stands afterwards.
        decided = store.compare_set(decision, "", "yes")
    else:
        with contextlib.suppress(RuntimeError):  # what every store's timeout is
            store.wait([decision], PATIENCE)
        # Not get, which waits: where the answer is no, another rank may have deleted it meanwhile.
        decided = store.compare_set(decision, "", "no")
    if not _leave(store, arrived, decision, world) and decided != b"yes":
        # Ranks may still come to this point; those of an old one have had time to.
        _left_behind.append((weakref.ref(store), point))
        if len(_left_behind) > _REMEMBERED:
            of_store, oldest = _left_behind.popleft()
            if of_store() is store:
                _delete(store, f"{oldest}/arrived", f"{oldest}/decision")
    return bool(decided == b"yes")


def first_common(point: str, offers: Sequence[str], world: int) -> str | None:
    """Return the first of ``offers`` that all ranks bring to ``point``, which every rank comes to; no collective.

    Offers are in an order that the ranks share. The result is the same on every rank; None where all share none.
    """
    store, arrived, decision = default_store(), f"{point}/arrived", f"{point}/decision"
    for offer in offers:
        store.add(f"{point}/offer {offer}", 1)
    if store.add(arrived, 1) == world:
        # Every rank brought its offers before it said that it arrived.
        common = (offer for offer in offers if store.add(f"{point}/offer {offer}", 0) == world)
        store.set(decision, next((f"yes {offer}" for offer in common), "no"))
    store.wait([decision])
    answer, _, offer = store.get(decision).decode().partition(" ")
    for brought in offers:
        _delete(store, f"{point}/offer {brought}")
    _leave(store, arrived, decision, world)
    return offer if answer == "yes" else None


def announce(ticket: str) -> None:
    """Say that this rank, about to join a collective, saw what ``ticket`` names."""
    default_store().add(ticket, 1)


def all_announced(ticket: str, world: int) -> bool:
    """Return whether all ranks told, the same answer everywhere; each that told asks once, after the collective."""
    store = default_store()
    # One atomic add both leaves the point and reads how many ranks told. The collective is over, so none tells later.
    passed, told = divmod(store.add(ticket, _PASSED), _PASSED)
    # Every rank that told has read its answer now: nobody else needs the key.
    if passed == told:
        _delete(store, ticket)
    return bool(told == world)


def _leave(store: Any, arrived: str, decision: str, world: int) -> bool:
    """Leave a point, and return whether this rank was the last of all to do so."""
    is_last = store.add(arrived, _PASSED) // _PASSED == world
    if is_last:
        _delete(store, arrived, decision)
    return bool(is_last)


def _delete(store: Any, *keys: str) -> None:
    with contextlib.suppress(NotImplementedError, RuntimeError):  # a store that cannot delete keeps its keys
        for key in keys:
            store.delete_key(key)


class _PooledGroup:
    """A process group, how many collectives its users called so far, and who has it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.calls = 0
        self.user: weakref.ref[OwnGroup] | None = None

    @property
    def is_free(self) -> bool:
        return self.user is None or self.user() is None


class OwnGroup:
    """A process group that nobody else uses while this is held.

    Its ranks share the name ``life``. No other user has it, not even in restarted processes, which a store may outlive.
    """

    def __init__(self, slot: _PooledGroup, life: str) -> None:
        self._slot, self.life = slot, life
        slot.user = weakref.ref(self)

    def of_next_call(self) -> dist.ProcessGroup:
        """Return the process group, for one collective."""
        self._slot.calls += 1
        return self._slot.group


class _Pool:
    """The groups of the same ranks, in the order in which they were made: the same on each of the ranks."""

    def __init__(self, ranks: tuple[int, ...], device: str) -> None:
        self._ranks = ranks
        self._uses = 0
        self.slots: list[_PooledGroup] = []
        group = self._new_slot().group
        # For a name that these ranks share and no ranks before them.
        nonce = torch.tensor(list(os.urandom(8)), dtype=torch.uint8, device=device)
        received = [torch.empty_like(nonce) for _ in ranks]
        dist.all_gather(received, nonce, group=group)
        self._life = hashlib.sha256(bytes(torch.cat(received).tolist())).hexdigest()

    def take(self) -> OwnGroup:
        """Return a group that is free on all ranks, or a new one."""
        self._uses += 1
        # Uses are counted in the same order on all ranks, so this name is the same on each of them.
        life = f"{self._life}/{self._uses}"
        # The first user gets the group that __init__ made, which no rank has used: there is nothing to agree on.
        if self._uses == 1:
            return OwnGroup(self.slots[0], life)
        taken = sum(not slot.is_free for slot in self.slots)
        if taken.bit_count() == 1:
            # Models are cycles, which are garbage for a while. Not at every number: it may take long.
            gc.collect()
        # A group is offered with its count of collectives: if the counts differ, a rank skipped one, and the group
        # would pair the next call on one rank with an older one on another.
        offers = {f"{i} {slot.calls}": slot for i, slot in enumerate(self.slots) if slot.is_free}
        chosen = first_common(f"f8sub/{life}/group", list(offers), len(self._ranks))
        return OwnGroup(self._new_slot() if chosen is None else offers[chosen], life)

    def _new_slot(self) -> _PooledGroup:
        # Synchronized by these ranks only: other ranks of the job do not come here.
        self.slots.append(_PooledGroup(new_group(self._ranks)))
        return self.slots[-1]


_pools: dict[tuple[int, ...], _Pool] = {}


def own_group(ranks: tuple[int, ...], device: str) -> OwnGroup:
    """Return a process group of two ranks or more, in an order that they share, for tensors on that type of device.

    All of them call this together, in the same order for the same ranks.
    """
    pool = _pools.get(ranks)
    # The default group may have been destroyed meanwhile, and all others with it.
    if pool is None or not all(is_alive(slot.group) for slot in pool.slots):
        pool = _pools[ranks] = _Pool(ranks, device)
    return pool.take()
