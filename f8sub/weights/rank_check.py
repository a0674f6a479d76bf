"""What every rank of a job has to have alike of the weights that it shards with others."""

import hashlib
import itertools
import json
from collections.abc import Sequence

import torch
import torch.distributed as dist

from f8sub.errors import Float8RankMismatchError
from f8sub.version import __version__
from f8sub.weights.conversion import Conversion, ParamDtypes
from f8sub.weights.exchange import Exchange
from f8sub.weights.gather_values import gather_values
from f8sub.weights.weight import WeightRecord


def compare(records: Sequence[WeightRecord], dtypes: ParamDtypes, exchange: Exchange) -> None:
    """Raise Float8RankMismatchError, on every rank alike, if ranks of an exchange were converted differently."""
    layout = exchange.layout
    of_guests = {n: said for guest in exchange.conversion.guests for n, said in guest.described().items()}
    mine = [
        {
            "layer": record.fqn,
            "f8sub": __version__,
            "shape": str(tuple(record.module._parameters[record.name].shape)),
            "dtype": str(record.module._parameters[record.name].dtype),
            **_of_layer(record, torch.device(layout.device), exchange.conversion),
            **of_guests,
            "param_dtype": str(dtypes.get((record.module, record.name))),
        }
        for record in records
    ]
    _check(mine, exchange.group_of(layout.ranks).of_next_call(), layout.device)


def _of_layer(record: WeightRecord, device: torch.device, conversion: Conversion) -> dict[str, str]:
    """What a layer multiplies by, once it came to ``device``; nothing of a module that has no plan."""
    module = record.module
    if not hasattr(module, "plan"):
        return {}
    # fully_shard moves weights to the mesh's device without a word to their layers.
    module.follow(device)
    plan = module.plan
    specs = {gemm: getattr(plan.recipe, gemm) for gemm in ("fprop", "dgrad", "wgrad")}
    return {
        "recipe": plan.recipe.name,
        **{
            gemm: f"{spec.a} by {spec.b}, fast_accum={spec.fast_accum}" if spec.a else "high precision"
            for gemm, spec in specs.items()
        },
        "backends": f"{plan.fprop}, {plan.dgrad}, {plan.wgrad}",
        "float8_all_gather": str(record.gathered),
        **{name: said for guest in conversion.layer_guests for name, said in guest.alike(module).items()},
    }


def _check(mine: list[dict[str, str]], group: dist.ProcessGroup, device: str) -> None:
    digest = hashlib.sha256(json.dumps(mine).encode()).digest()
    sent = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    world = dist.get_world_size(group)
    received = [torch.empty_like(sent) for _ in range(world)]
    dist.all_gather(received, sent, group=group)
    if all(bytes(theirs.tolist()) == digest for theirs in received):
        return
    everyone: list[list[dict[str, str]]] = gather_values(mine, group)
    ranks = dist.get_process_group_ranks(group)
    raise Float8RankMismatchError(_difference(dict(zip(ranks, everyone, strict=True))))


def _difference(everyone: dict[int, list[dict[str, str]]]) -> str:
    """Which ranks differ in which fields of the first layer that differs; the same text on every rank."""
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
