"""Which ranks of a shard group share a host, and the groups of a reduction in two hops."""

import os
import socket
from typing import Any

import torch.distributed as dist

from f8sub.errors import Float8ConfigError, Float8RankMismatchError
from f8sub.features.gradient_wire.reduction import Hops
from f8sub.torch_compat import is_alive

_groups: dict[tuple[tuple[int, ...], int], Hops] = {}
"""Those of each shard group and number of ranks of a host: models share them, as FSDP2's own groups."""


def hops_of(group: dist.ProcessGroup, flat: bool, ranks_per_host: int | None, every: int) -> Hops | None:
    """The groups of two hops; None where one is right. A collective of ``group``, in which ranks compare options."""
    me = dist.get_rank()
    host = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"  # torchrun's number of the host
    place = host if ranks_per_host is None else f"host {me // ranks_per_host}"
    options = {"flat": flat, "ranks_per_host": ranks_per_host, "measure_every": every}
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, (place, options), group=group)
    ranks = dist.get_process_group_ranks(group)
    for rank, (_, other) in zip(ranks, found, strict=True):
        if other != options:
            raise Float8RankMismatchError(
                f"reduce_gradients_in_float8 was called with different options: rank {me} has {options}, rank {rank} "
                f"has {other}; give all ranks the same"
            )
    places = [where for where, _ in found]
    local, hosts = places.count(places[0]), len(set(places))
    if flat or hosts in (1, len(places)):
        return None
    if places != [places[first] for first in range(0, len(places), local) for _ in range(local)]:
        raise Float8ConfigError(
            f"the ranks {ranks} of a shard group are on the hosts {places}, not equally many on each and one after "
            "another, so gradients cannot be added on each host first. One exchange over all of them sends each "
            "gradient of each rank over the network, where a ring sends it once a host: more bytes than in bfloat16. "
            "Order the ranks by hosts, give ranks_per_host, or ask for it with flat=True"
        )
    return _made(tuple(ranks), local)


def _made(ranks: tuple[int, ...], local: int) -> Hops:
    known = _groups.get((ranks, local))
    if known is not None and all(map(is_alive, known)):
        return known
    host, place = divmod(ranks.index(dist.get_rank()), local)
    within = dist.new_group(list(ranks[host * local : (host + 1) * local]), use_local_synchronization=True)
    across = dist.new_group(list(ranks[place::local]), use_local_synchronization=True)
    _groups[ranks, local] = Hops(within, across)
    return _groups[ranks, local]
