"""Which ranks of a shard group share a host, and the groups of a reduction in two hops."""

import hashlib
import os
import socket

import torch
import torch.distributed as dist

from f8sub.errors import Float8ConfigError, Float8RankMismatchError
from f8sub.gradients.reduction import Hops
from f8sub.torch_compat import all_gather, is_alive

_groups: dict[tuple[tuple[int, ...], int], Hops] = {}
"""Those of each shard group and number of ranks of a host: models share them, as FSDP2's own groups."""


def hops_of(
    group: dist.ProcessGroup, device: torch.device, options: tuple[bool, int | None, int]
) -> Hops | None:
    """The groups of two hops; None where one is right. A collective of ``group``, in which ranks compare options."""
    (flat, ranks_per_host, _), me = options, dist.get_rank()
    # torchrun's number tells hosts of one name.
    name = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}".encode()
    host = (
        int.from_bytes(hashlib.sha256(name).digest()[:7]) if ranks_per_host is None else me // ranks_per_host
    )
    own = torch.tensor([host, *map(int, [o or 0 for o in options])], dtype=torch.int64, device=device)
    found = torch.empty(group.size() * own.numel(), dtype=torch.int64, device=device)
    all_gather(found, own, group)
    rows, ranks = found.view(group.size(), -1).tolist(), dist.get_process_group_ranks(group)
    for rank, row in zip(ranks, rows, strict=True):
        if row[1:] != own[1:].tolist():
            raise Float8RankMismatchError(
                "reduce_gradients_in_float8 was called with different options: flat, ranks_per_host and measure_every "
                f"are {own[1:].tolist()} on rank {me} and {row[1:]} on rank {rank}; give all ranks the same"
            )
    hosts = list(dict.fromkeys(row[0] for row in rows))
    places = [hosts.index(row[0]) for row in rows]
    local = places.count(0)
    if flat or len(hosts) in (1, len(places)):
        return None
    if places != [host for host in range(len(hosts)) for _ in range(local)]:
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
