"""Agree over the store whether every rank came to the same point, without waiting for one that does not.

Nothing stays in the store. A point is counted in one key: every rank adds 1 when it comes and ``_PASSED`` when it
leaves, after it has read what it came for. So the rank whose count says that all left is the last reader, and it alone
deletes the keys.
"""

import collections
import contextlib
import datetime
import weakref
from collections.abc import Sequence
from typing import Any

from f8sub.torch_compat import default_store

PATIENCE = datetime.timedelta(seconds=3)
"""How long a rank waits for the others before all of them do without."""

_PASSED = 1 << 32
"""What a rank adds to a count when it leaves; larger than any number of ranks."""

_REMEMBERED = 16
"""Points that not all ranks came to whose keys a rank leaves in the store, for those that come late."""

_left_behind: collections.deque[tuple[weakref.ref[Any], str]] = collections.deque()
"""Those points, each with its store."""


def all_arrive(point: str, world: int) -> bool:
    """Whether all ``world`` ranks come to ``point``; every rank that comes gets the same answer.

    The last rank to arrive decides yes, the first to lose patience decides no, and the first decision stands. One that
    comes later finds it made. One that comes so late that the decision was deleted waits, and decides no again: those
    who deleted it do not come a second time. ``point`` is a name that the ranks share and used for no other decision.
    """
    store, arrived, decision = default_store(), f"{point}/arrived", f"{point}/decision"
    if store.add(arrived, 1) % _PASSED == world:
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
    """The first of ``offers`` that all ranks bring to ``point``, which no rank can fail to come to; no collective.

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


def tell(ticket: str) -> None:
    """Say that this rank, about to join a collective, saw what ``ticket`` names."""
    default_store().add(ticket, 1)


def all_told(ticket: str, world: int) -> bool:
    """Whether all ranks told, the same answer everywhere; every rank that told asks once, after the collective."""
    store = default_store()
    passed, told = divmod(store.add(ticket, _PASSED), _PASSED)
    if passed == told:
        _delete(store, ticket)
    return bool(told == world)


def _leave(store: Any, arrived: str, decision: str, world: int) -> bool:
    """Leave a point; whether this rank was the last of all to do so."""
    is_last = store.add(arrived, _PASSED) // _PASSED == world
    if is_last:
        _delete(store, arrived, decision)
    return bool(is_last)


def _delete(store: Any, *keys: str) -> None:
    with contextlib.suppress(NotImplementedError, RuntimeError):  # a store that cannot delete keeps its keys
        for key in keys:
            store.delete_key(key)
