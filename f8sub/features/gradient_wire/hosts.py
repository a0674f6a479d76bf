"""Which ranks of a shard group share a host, and the groups of a reduction in two hops."""

import os
import socket

import torch.distributed as dist

from f8sub.errors import Float8ConfigError, Float8RankMismatchError
from f8sub.features.gradient_wire.reduction import Hops
from f8sub.torch_compat import is_alive

_groups: dict[tuple[tuple[int, ...], int], Hops] = {}
"""Those of each shard group and number of ranks of a host: models share them, as FSDP2's own groups."""


def hops_of(
    group: dist.ProcessGroup, hops: int | None, ranks_per_host: int | None, options: tuple[object, ...]
) -> Hops | None:
    """The groups of two hops, or None where one is right; every rank of ``group`` calls it, with equal options.

    A collective of ``group``, in which every rank also says its options.

    Raises:
        Float8RankMismatchError: ranks have different options.
        Float8ConfigError: one hop over several hosts would be slower than a ring, and nobody asked for it; or two were
            asked for and there is one host.
    """
    me = dist.get_rank()
    host = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"
    place = host if ranks_per_host is None else f"host {me // ranks_per_host}"
    found: list[tuple[str, tuple[object, ...]]] = [("", ())] * group.size()
    dist.all_gather_object(found, (place, (hops, *options)), group=group)
    places, said = [where for where, _ in found], [what for _, what in found]
    ranks = dist.get_process_group_ranks(group)
    if len(set(said)) > 1:
        other = next(rank for rank, what in zip(ranks, said, strict=True) if what != said[ranks.index(me)])
        raise Float8RankMismatchError(
            f"reduce_gradients_in_float8 was called with different options or for different models: rank {me} has "
            f"{said[ranks.index(me)]}, rank {other} has {said[ranks.index(other)]}; give all ranks the same"
        )
    local = places.count(places[0])
    number = len(set(places))
    is_regular = all(len(set(places[i : i + local])) == 1 for i in range(0, len(places), local))
    is_regular &= number * local == len(places)
    if hops == 2 and (number == 1 or local == 1 or not is_regular):
        raise Float8ConfigError(
            f"hops=2 needs several hosts with equally many ranks of the shard group each, which follow one another; "
            f"the ranks {ranks} are on {places}. Leave hops out, or give ranks_per_host"
        )
    if hops == 1 or number in (1, len(places)):
        return None
    if not is_regular:
        raise Float8ConfigError(
            f"the ranks {ranks} of a shard group are on the hosts {places}, not equally many on each and one after "
            "another, so gradients cannot be added on each host first. One exchange over all of them would send each "
            "gradient of each rank over the network, where a ring sends it once a host: more bytes than bfloat16's. "
            "Order the ranks by hosts, or ask for it with hops=1"
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
