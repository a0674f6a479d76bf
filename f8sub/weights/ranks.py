"""Process groups of f8sub's own: one user at a time, and kept for the next one when the user is gone.

A group has one user at a time, because ranks need not reduce two exchanges in one order. A rank that forgets
``precompute_scales`` reduces before its next all-gather, when the others may have reduced the table of another model.
On one group the tables' all-reduces would be paired wrongly; on a group of each its own they cannot be.

A group is used again, because each one takes sockets and threads (gloo) or device memory (NCCL). It is not destroyed
with its user: garbage is collected at other times on other ranks. ``new_group`` names a group by its ranks and by how
many groups the process has. Where ranks destroyed theirs at different times those numbers would differ, and the next
``new_group`` would wait for ever. Nor could such a name be used twice: the store still has the addresses of the first.

The ranks agree over the store which group is free on all of them. One that a rank has used more often than another,
because its user there ended in a different place, is free on none: its collectives no longer pair.
"""

import gc
import hashlib
import itertools
import json
import os
import weakref
from typing import Any

import torch
import torch.distributed as dist

from f8sub.errors import Float8RankMismatchError
from f8sub.torch_compat import device_of_objects, is_alive
from f8sub.weights.agreement import first_common


class _Slot:
    """A process group, and who has it.

    Attributes:
        group: the process group.
        calls: how many collectives its users called so far.
        user: refers to the ``OwnGroup`` of the present user, or to None.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.calls = 0
        self.user: weakref.ref[OwnGroup] | None = None

    @property
    def is_free(self) -> bool:
        return self.user is None or self.user() is None


class OwnGroup:
    """A process group that nobody else uses while this is held.

    Attributes:
        life: a name that its ranks share, and that no other user of a group has, now or in processes that were
            restarted: a store may outlive those.
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
        self._slots: list[_Slot] = []
        self._life = _exchange_nonces(self._new_slot().group, device)

    @property
    def is_alive(self) -> bool:
        """Whether no process group was destroyed meanwhile, the default one with all others for instance."""
        return all(is_alive(slot.group) for slot in self._slots)

    def take(self) -> OwnGroup:
        """A group that is free on all ranks, or a new one."""
        self._uses += 1
        life = f"{self._life}/{self._uses}"
        slot = self._free(life) if self._uses > 1 else self._slots[0]
        return OwnGroup(slot or self._new_slot(), life)

    def _free(self, life: str) -> _Slot | None:
        taken = sum(not slot.is_free for slot in self._slots)
        if taken.bit_count() == 1:
            # Models are cycles, which are garbage for a while. Not at every number: it may take long.
            gc.collect()
        offers = {f"{i} {slot.calls}": slot for i, slot in enumerate(self._slots) if slot.is_free}
        chosen = first_common(f"f8sub/{life}/group", list(offers), len(self._ranks))
        return None if chosen is None else offers[chosen]

    def _new_slot(self) -> _Slot:
        self._slots.append(_Slot(dist.new_group(list(self._ranks), use_local_synchronization=True)))
        return self._slots[-1]


_pools: dict[tuple[int, ...], _Pool] = {}


def own_group(ranks: tuple[int, ...], device: str) -> OwnGroup:
    """A process group of these ranks; all of them call this together, in the same order for the same ranks.

    Args:
        ranks: at least two, in an order that they share.
        device: type of the device whose tensors will be reduced.
    """
    pool = _pools.get(ranks)
    if pool is None or not pool.is_alive:
        pool = _pools[ranks] = _Pool(ranks, device)
    return pool.take()


def _exchange_nonces(group: dist.ProcessGroup, device: str) -> str:
    """A name that the ranks share and no ranks before them."""
    nonce = torch.tensor(list(os.urandom(8)), dtype=torch.uint8, device=device)
    received = [torch.empty_like(nonce) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, nonce, group=group)
    return hashlib.sha256(bytes(torch.cat(received).tolist())).hexdigest()


def gather_values(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What every rank of a group says, in the order of the ranks; ``dist.all_gather_object`` needs NumPy.

    Args:
        mine: what JSON can say.
        group: None for all ranks of the job.
    """
    device, world = device_of_objects(group), dist.get_world_size(group)
    said = list(json.dumps(mine).encode())
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(said)], dtype=torch.int64, device=device), group=group)
    longest = max(int(size) for size in sizes)
    texts = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(world)]
    padded = said + [0] * (longest - len(said))
    dist.all_gather(texts, torch.tensor(padded, dtype=torch.uint8, device=device), group=group)
    return [json.loads(bytes(text[: int(size)].tolist())) for text, size in zip(texts, sizes, strict=True)]


Described = dict[str, str]
"""A weight by what every rank has to have alike of it."""


def check_ranks(mine: list[Described], group: dist.ProcessGroup, device: str) -> None:
    """Compare what was converted, and how, across the ranks that are about to exchange codes or gradients.

    Raises:
        Float8RankMismatchError: on every rank alike, with the ranks and the first layer that differ.
    """
    digest = hashlib.sha256(json.dumps(mine).encode()).digest()
    sent = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    world = dist.get_world_size(group)
    received = [torch.empty_like(sent) for _ in range(world)]
    dist.all_gather(received, sent, group=group)
    if all(bytes(theirs.tolist()) == digest for theirs in received):
        return
    everyone: list[list[Described]] = gather_values(mine, group)
    ranks = dist.get_process_group_ranks(group)
    raise Float8RankMismatchError(_difference(dict(zip(ranks, everyone, strict=True))))


def _difference(everyone: dict[int, list[Described]]) -> str:
    """Which ranks differ, in the first layer and the fields that they differ in; the same text on every rank."""
    for layers in itertools.zip_longest(*everyone.values(), fillvalue={"layer": "none further"}):
        fields = [field for field in layers[0] if len({str(layer.get(field)) for layer in layers}) > 1]
        if not fields:
            continue
        found: dict[str, list[int]] = {}
        for rank, layer in zip(everyone, layers, strict=True):
            said = ", ".join(f"{field} {layer[field]}" for field in fields if field in layer)
            found.setdefault(said, []).append(rank)
        sides = "; ".join(f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}: {s}" for s, r in found.items())
        return (
            f"ranks were converted differently. {layers[0]['layer']}: {sides}. Call convert_to_float8 and "
            "fully_shard with the same arguments on every rank, and install the same f8sub"
        )
    raise RuntimeError("ranks whose digests differ describe the same layers")
