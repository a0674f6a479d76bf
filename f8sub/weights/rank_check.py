"""What the ranks that shard a model's weights have to have alike, compared once."""

import hashlib
import itertools
import json

import torch
import torch.distributed as dist

from f8sub.errors import Float8RankMismatchError

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
    everyone: list[list[Described]] = [[] for _ in range(world)]
    dist.all_gather_object(everyone, mine, group=group)
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
