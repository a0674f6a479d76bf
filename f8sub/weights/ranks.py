"""Process groups of f8sub's own: one user at a time, and kept for the next one when the user is gone.

A group has one user at a time, because ranks need not reduce two exchanges in one order. A rank that forgets
``precompute_scales`` reduces before its next all-gather, when the others may have reduced the table of another model.
On one group those all-reduces would be paired wrongly.

A group is used again, because each one takes sockets and threads (gloo) or device memory (NCCL). It is not destroyed
with its user, because garbage is collected at other times on other ranks. ``new_group`` names a group by its ranks and
by how many groups the process has: those numbers would differ, and the next ``new_group`` would wait for ever.

The ranks agree over the store which group is free on all of them. One that a rank used more often than another is free
on none: its collectives no longer pair.
"""

import gc
import hashlib
import os
import weakref

import torch
import torch.distributed as dist

from f8sub.torch_compat import is_alive
from f8sub.weights.agreement import first_common


class _Slot:
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

    def __init__(self, slot: _Slot, life: str) -> None:
        self._slot, self.life = slot, life
        slot.user = weakref.ref(self)

    def of_next_call(self) -> dist.ProcessGroup:
        """The process group, for one collective."""
        self._slot.calls += 1
        return self._slot.group


class _Pool:
    """The groups of the same ranks, in the order in which they were made: the same on each of the ranks."""

    def __init__(self, ranks: tuple[int, ...], device: str) -> None:
        self._ranks = ranks
        self._uses = 0
        self.slots: list[_Slot] = []
        group = self._new_slot().group
        # For a name that these ranks share and no ranks before them.
        nonce = torch.tensor(list(os.urandom(8)), dtype=torch.uint8, device=device)
        received = [torch.empty_like(nonce) for _ in ranks]
        dist.all_gather(received, nonce, group=group)
        self._life = hashlib.sha256(bytes(torch.cat(received).tolist())).hexdigest()

    def take(self) -> OwnGroup:
        """A group that is free on all ranks, or a new one."""
        self._uses += 1
        life = f"{self._life}/{self._uses}"
        if self._uses == 1:
            return OwnGroup(self.slots[0], life)
        taken = sum(not slot.is_free for slot in self.slots)
        if taken.bit_count() == 1:
            # Models are cycles, which are garbage for a while. Not at every number: it may take long.
            gc.collect()
        offers = {f"{i} {slot.calls}": slot for i, slot in enumerate(self.slots) if slot.is_free}
        chosen = first_common(f"f8sub/{life}/group", list(offers), len(self._ranks))
        return OwnGroup(self._new_slot() if chosen is None else offers[chosen], life)

    def _new_slot(self) -> _Slot:
        self.slots.append(_Slot(dist.new_group(list(self._ranks), use_local_synchronization=True)))
        return self.slots[-1]


_pools: dict[tuple[int, ...], _Pool] = {}


def own_group(ranks: tuple[int, ...], device: str) -> OwnGroup:
    """A process group of two ranks or more, in an order that they share, for tensors on that type of device.

    All of them call this together, in the same order for the same ranks.
    """
    pool = _pools.get(ranks)
    # The default group may have been destroyed meanwhile, and all others with it.
    if pool is None or not all(is_alive(slot.group) for slot in pool.slots):
        pool = _pools[ranks] = _Pool(ranks, device)
    return pool.take()
