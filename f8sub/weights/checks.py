"""Compares ranks before the first collective that depends on what they have in common, and warns of FSDP1.

FSDP1, torch's FullyShardedDataParallel, makes one flat parameter of many weights, and gathers no float8.
"""

import functools
import hashlib
import itertools
import json
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from f8sub.errors import Float8ConfigError, Float8RankMismatchError, Float8Warning, first_and_more
from f8sub.torch_compat import device_of_objects, flattened_by_fsdp1, fsdp_params, module_of, remove_hook
from f8sub.version import __version__
from f8sub.weights.conversion import Conversion, Guest, LayerGuest, ParamDtypes
from f8sub.weights.exchange import Exchange
from f8sub.weights.layout import ShardLayout
from f8sub.weights.weight import STATE, WeightRecord


def gather_values(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather a value of every rank of a group, in the order of the ranks; ``dist.all_gather_object`` needs NumPy.

    Args:
        mine: a value that JSON can hold.
        group: None for all ranks of the job.
    """
    device, world = device_of_objects(group), dist.get_world_size(group)
    said = list(json.dumps(mine).encode())
    # Texts differ in length and all_gather takes equal sizes: the lengths go first, then the padded texts.
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(said)], dtype=torch.int64, device=device), group=group)
    longest = max(int(size) for size in sizes)
    texts = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(world)]
    padded = said + [0] * (longest - len(said))
    dist.all_gather(texts, torch.tensor(padded, dtype=torch.uint8, device=device), group=group)
    return [json.loads(bytes(text[: int(size)].tolist())) for text, size in zip(texts, sizes, strict=True)]


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
    """Describe what a layer multiplies by, once it came to ``device``; {} for a module that is not converted."""
    module = record.module
    if (state := vars(module).get(STATE)) is None:
        return {}
    # fully_shard moves weights to the mesh's device without a word to their layers.
    state.follow(device)
    plan = state.plan
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
    # 32 bytes per rank, however many layers: the descriptions themselves are sent only where the digests differ.
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
    """Describe which ranks differ in which fields of the first layer that differs; the same text on every rank."""
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


class ShardChecks(Guest):
    """Compares the ranks' weights, and then checks that they can be gathered as float8."""

    @override
    def entered(
        self, members: Sequence[tuple[WeightRecord, ShardLayout]], dtypes: ParamDtypes, exchange: Exchange
    ) -> None:
        # Before the first collective of these weights: ranks that disagree would wait in it for ever, or mix data.
        if len(exchange.layout.ranks) > 1:
            compare([record for record, _ in members], dtypes, exchange)
        gathered = [each for each in members if each[0].gathered]
        if gathered:
            _refuse_resharding([record for record, _ in gathered])
        for record, layout in gathered:
            if (record.module, record.name) in dtypes:
                _refuse_cuts(record, layout)


def _refuse_resharding(records: Sequence[WeightRecord]) -> None:
    """Refuse an integer ``reshard_after_forward``: FSDP2 would gather again without calling the hooks."""
    kept = {module_of(p) for g, p in fsdp_params() if g.post_forward_mesh_info not in (None, g.mesh_info)}
    if fqns := sorted({record.fqn for record in records if record.module in kept}):
        raise Float8ConfigError(
            f"{first_and_more(fqns)}: sharded with reshard_after_forward=<int>, which FSDP2 does not "
            "do for weights with all-gather hooks (torch raises NotImplementedError in backward); pass True or "
            "False to fully_shard, or convert with float8_all_gather=False"
        )


def _refuse_cuts(record: WeightRecord, layout: ShardLayout) -> None:
    """Refuse shards whose data no GEMM could read: packed bytes cut by columns, or tiles that reach out of a part."""
    if (format := record.format) is None:
        return
    if format.codes_per_byte > 1 and layout.dim != 0:
        raise Float8ConfigError(
            f"{record.fqn}: its weight is sharded by columns (Shard({layout.dim})), which FSDP2 "
            f"puts together from one byte per element, and {format} has two in one; "
            "shard it by rows, or convert with float8_all_gather=False"
        )
    for dim, part in layout.cuts:
        layout.format_of(format, record.fqn).tile.check_cut(
            dim, layout.whole[dim], part, f"{record.fqn}: its weight {layout.whole}"
        )


class Fsdp1(LayerGuest):
    """Looks at a model's first forward for FSDP1, which flattens weights."""

    @override
    def converted(self, model: torch.nn.Module, conversion: Conversion) -> None:
        model.register_forward_pre_hook(functools.partial(warn_of_fsdp1, conversion))


def warn_of_fsdp1(conversion: Conversion, module: torch.nn.Module, args: Any) -> None:
    """Warn once, in a forward pre-hook of a converted model, where FSDP1 flattened its weights."""
    if torch.compiler.is_compiling():
        return
    remove_hook(warn_of_fsdp1, module)
    names = {record.module: record.fqn for record in conversion}
    if layers := [names[layer] for layer in flattened_by_fsdp1(module, names)]:
        warnings.warn(
            f"{first_and_more(layers)}: in float8, and sharded by FSDP1 (FullyShardedDataParallel), which flattens "
            "weights: they are gathered in high precision, and each layer casts its own again in every "
            "forward. Shard with torch.distributed.fsdp.fully_shard, which gathers float8",
            Float8Warning,
            stacklevel=2,
        )
