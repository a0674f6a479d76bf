"""Layer 5. Agree over the store whether every rank came to the same point, without waiting for one that does not."""

import datetime

from f8sub.torch_compat import default_store

PATIENCE = datetime.timedelta(seconds=3)
"""How long a rank waits for the others before all of them do without."""


def all_arrive(point: str, world: int) -> bool:
    """Whether all ``world`` ranks come to ``point``; every rank that comes gets the same answer.

    The last rank to arrive decides yes, the first to lose patience decides no, and the first decision stands. A rank
    that never comes is not needed for it, and one that comes later finds it made.

    Args:
        point: a name that the ranks share and never used before for another decision.
        world: how many ranks there are.
    """
    store, decision = default_store(), f"{point}/decision"
    if store.add(f"{point}/arrived", 1) == world:
        store.compare_set(decision, "", "yes")
    else:
        try:
            store.wait([decision], PATIENCE)
        except RuntimeError:  # what every store's timeout is
            store.compare_set(decision, "", "no")
    return bool(store.get(decision) == b"yes")


def all_same(point: str, value: str, world: int) -> bool:
    """Whether all ranks bring the same value to ``point``, which no rank can fail to come to; no collective.

    Args:
        point: see ``all_arrive``.
        value: what this rank brings.
        world: how many ranks there are.
    """
    store, decision = default_store(), f"{point}/decision"
    store.add(f"{point}/{value}", 1)
    if store.add(f"{point}/arrived", 1) == world:
        # Every rank said its value before it said that it arrived.
        same = store.add(f"{point}/{value}", 0) == world
        store.compare_set(decision, "", "yes" if same else "no")
    store.wait([decision])
    return bool(store.get(decision) == b"yes")


def tell(ticket: str) -> None:
    """Say that this rank, about to join a collective, saw what ``ticket`` names."""
    default_store().add(ticket, 1)


def all_told(ticket: str, world: int) -> bool:
    """Whether all ranks told; the same answer everywhere once the collective that they joined is over."""
    return bool(default_store().add(ticket, 0) == world)
