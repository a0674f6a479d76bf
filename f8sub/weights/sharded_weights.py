"""The sharded weights of one conversion, in the tables that reduce their amaxes, checked across ranks once."""

import hashlib
import itertools
import json
import warnings
import weakref
from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from f8sub.errors import Float8ConfigError, Float8NumericsError, Float8RankMismatchError, Float8Warning
from f8sub.features.delayed.histories import LocalHistories, Replicas
from f8sub.features.primary_weights.primary_weight import master_of
from f8sub.linear.float8_linear import Float8Linear
from f8sub.recipe import GemmSpec
from f8sub.torch_compat import fully_sharded, graph_task, resharded_to_part, running_ddp
from f8sub.version import __version__
from f8sub.weights.agreement import all_arrive
from f8sub.weights.findings import non_finite
from f8sub.weights.held_weights import HeldWeights
from f8sub.weights.layout import ShardLayout, sharded_dims
from f8sub.weights.registry import ConvertedLayers
from f8sub.weights.scale_table import ScaleTable
from f8sub.weights.shard import Shard

Ranks = tuple[dist.ProcessGroup, tuple[int, ...], tuple[int, ...]]


def _ranks_of(layout: ShardLayout) -> Ranks:
    return layout.group, layout.sharers, layout.ranks


class ShardedConversion:
    """What ``fully_shard`` made of the layers of one conversion.

    Attributes:
        tables: one for each process group that gathers weights, set of ranks that share their scales, and of those
            that they are on in all.
    """

    def __init__(self, layers: ConvertedLayers) -> None:
        self.tables: dict[Ranks, ScaleTable] = {}
        self._layers = layers
        self._shards: weakref.WeakKeyDictionary[Float8Linear, Shard] = weakref.WeakKeyDictionary()
        self._table_of: dict[Shard, ScaleTable] = {}
        self._seen: weakref.WeakSet[Float8Linear] = weakref.WeakSet()
        self._named: weakref.WeakValueDictionary[str, Float8Linear] = weakref.WeakValueDictionary()
        self._local = LocalHistories()
        self._held = HeldWeights()
        self._steps_rolled = 0
        self._asked_at: dict[ScaleTable, int] = {}

    @classmethod
    def of(cls, layers: ConvertedLayers) -> "ShardedConversion":
        """The one of these layers, made at the first call."""
        if layers.fsdp is None:
            layers.fsdp = cls(layers)
        conversion: ShardedConversion = layers.fsdp
        return conversion

    def refresh(self, *, asked: bool = False) -> None:
        """Enter the layers that were sharded since the last look.

        Which layers those are, every rank knows; that a known layer got another local tensor, one rank alone may
        (FSDP2 pads the short shards anew), so that is looked at where nothing is communicated.

        Args:
            asked: this is because of a call that a rank may have forgotten, so nothing is begun together before
                all ranks came. Else it is before an all-gather, which no rank can forget.
        """
        if len(self._seen) != len(self._layers):
            new = [(layer, layer.weight) for layer in self._layers if layer not in self._seen]
            if sharded := [(la, w) for la, w in new if isinstance(w, DTensor) and sharded_dims(w)]:
                self._enter(sharded, asked)
        for layer, shard in self._shards.items():
            shard.follow(layer)

    def shard_of(self, layer: Float8Linear) -> tuple[Shard, ScaleTable]:
        """The shard of a layer whose weight is about to be gathered, and the table that its scales come from."""
        if layer not in self._seen:
            self.refresh()
        shard = self._shards.get(layer)
        if shard is None:
            raise Float8ConfigError(
                f"{layer.fqn}: its weight is gathered but is not a sharded parameter of the layer "
                f"({type(layer.weight).__name__}); assign weights before fully_shard"
            )
        shard.follow(layer)
        return shard, self._table_of[shard]

    def shard_named(self, fqn: str) -> tuple[Shard, ScaleTable]:
        """The shard of the layer of that name, where that is all that is known of it."""
        if fqn not in self._named:
            self.refresh()
        return self.shard_of(self._named[fqn])

    def roll(self) -> None:
        """After an optimizer step: roll the histories that no all-gather will ask for.

        Not during a backward pass, see ``ScaleTable.roll_due``; the next call does it.
        """
        since = max(self._steps_rolled, self._layers.loaded_at)
        if self._layers.steps <= since or graph_task() != -1:
            return
        self._steps_rolled = self._layers.steps
        if not any(layer.states() for layer in self._layers):
            return
        self.refresh()
        for table in self.tables.values():
            table.roll()
        held = [
            (layer, state)
            for layer in self._layers
            for state in layer.states()
            if layer not in self._shards or state.recipe != layer.plan.recipe
        ]
        self._local.roll(held, sharded=self._seen, since=since)
        self._held.skip(layer for layer, _ in held)

    def replicate(self) -> bool:
        """Have the ranks of DDP share what their amax histories see, if DDP runs the layers now.

        Returns:
            Whether there is no more to wait for: they do, or FSDP2 shards the layers.
        """
        if self._local.replicas is None and not self._seen and (ddp := running_ddp()) is not None:
            self._local.replicas = Replicas(ddp)
        return bool(self._seen) or self._local.replicas is not None

    def settle(self) -> None:
        """Roll what is due and finish what is under way, before a state dict of the histories is taken or loaded."""
        for (*_, ranks), table in self.tables.items():
            if table.roll_due and self._all_settle(table, ranks):
                table.reduce(tell=False)
            table.settle_histories()

    def _all_settle(self, table: ScaleTable, ranks: tuple[int, ...]) -> bool:
        """Whether all ranks came to ``settle`` since the last optimizer step; asked once, not for every layer."""
        step = self._layers.steps
        if len(ranks) == 1 or self._asked_at.get(table) == step:
            return len(ranks) == 1
        self._asked_at[table] = step
        if all_arrive(f"f8sub/{table.group_of(ranks).life}/settle/{step}", len(ranks)):
            return True
        warnings.warn(
            f"{table.shards[0].fqn}: a state dict was taken or loaded on some ranks only, after an optimizer step and "
            "before precompute_scales(model); it lacks what the amax histories saw in that step. Call "
            "precompute_scales(model) first, or take it on every rank",
            Float8Warning,
            stacklevel=2,
        )
        return False

    def raise_local(self) -> None:
        """Tell of NaN and infinity that this rank met in layers that are not sharded.

        Raises:
            Float8NumericsError: with the layers and operands.
        """
        for message in non_finite(self._local.non_finite(), self._layers):
            raise Float8NumericsError(message)

    def check_held(self) -> None:
        """Tell what the call before found in the weights that no table covers, and look at them again.

        Raises:
            Float8NumericsError: NaN or infinity; names the layers.
        """
        if len(self._shards) < len(self._layers):
            self._held.check([layer for layer in self._layers if layer not in self._shards])

    def _enter(self, new: list[tuple[Float8Linear, DTensor]], asked: bool) -> None:
        _refuse_partly_resharded([layer for layer, _ in new])
        layouts = {layer: ShardLayout.of(weight) for layer, weight in new}
        sent = {layer for layer in fully_sharded(layouts) if layer.float8_all_gather}
        for layer, layout in layouts.items():
            # fully_shard moves weights to the mesh's device without a word to their layers.
            layer.follow(torch.device(layout.device))
        for key in dict.fromkeys(map(_ranks_of, layouts.values())):
            members = [(layer, weight) for layer, weight in new if _ranks_of(layouts[layer]) == key]
            layout = layouts[members[0][0]]
            ranks, world = hashlib.sha256(str(layout.ranks).encode()).hexdigest(), len(layout.ranks)
            table = self.tables.get(key) or ScaleTable(self._layers, layout)
            if world > 1:
                if asked and not all_arrive(f"f8sub/{ranks}/enter/{_entered[ranks]}", world):
                    continue
                group = table.group_of(layout.ranks).of_next_call()
                _check_ranks([layer for layer, _ in members], group, layout.device)
                if len(layout.sharers) > 1:
                    table.group_of(layout.sharers)  # now, when all of them are here
            _entered[ranks] += 1
            self._seen.update(layer for layer, _ in members)
            self._named.update((layer.fqn, layer) for layer, _ in members)
            for layer, weight in members:
                if layer in sent or layer.plan.recipe.delayed is not None:
                    shard = self._shard(layer, weight, layouts[layer], layer in sent)
                    self._shards[layer] = shard
                    self._table_of[shard] = table
            if shards := {la: shard for la, shard in self._shards.items() if self._table_of[shard] is table}:
                self.tables[key] = table
                table.set_shards(shards)

    def _shard(self, layer: Float8Linear, weight: DTensor, layout: ShardLayout, sent: bool) -> Shard:
        local = weight._local_tensor
        master = master_of(local)
        if master is None or (sent and not hasattr(local, "fsdp_pre_all_gather")):
            raise Float8ConfigError(
                f"{layer.fqn}: FSDP2 would gather its weight in high precision, because it is a "
                f"{type(local).__name__} that took the converted weight's place; assign weights before "
                "convert_to_float8, or copy into them"
            )
        recipe = layer.plan.recipe
        if sent and recipe.fprop.b is None:
            raise Float8ConfigError(
                f"{layer.fqn}: recipe {recipe.name!r} keeps the weight of fprop in high precision, "
                "so there is no float8 to gather; convert with float8_all_gather=False"
            )
        format = next(f for f in (recipe.fprop.b, recipe.dgrad.b, recipe.wgrad.b) if f is not None)
        if sent and format.codes_per_byte > 1 and layout.dim != 0:
            raise Float8ConfigError(
                f"{layer.fqn}: its weight is sharded by columns (Shard({layout.dim})), which FSDP2 "
                f"puts together from one byte an element, and {format} has two in one; "
                "shard it by rows, or convert with float8_all_gather=False"
            )
        if sent:
            layout.check_lines_up(format.tile, layer.fqn)
        master.cell.belongs_to(self._layers, layer.fqn)
        tied = next((s for s in self._shards.values() if s.master.cell is master.cell), None)
        state = None if recipe.delayed is None else layer.scaling_state(recipe)
        return tied or Shard(layer.fqn, master, layout, format, state, sent=sent)


def _refuse_partly_resharded(layers: list[Float8Linear]) -> None:
    """FSDP2 gathers anew what it kept of a weight after forward, without the hooks that would say what it is."""
    if found := resharded_to_part(layer for layer in layers if layer.float8_all_gather):
        fqns = sorted(str(layer.fqn) for layer in found)
        raise Float8ConfigError(
            f"{fqns[0]} and {len(fqns) - 1} more: sharded with reshard_after_forward=<int>, which FSDP2 does not do "
            "for weights with all-gather hooks (torch raises NotImplementedError in backward); pass True or False to "
            "fully_shard, or convert with float8_all_gather=False"
        )


_entered: Counter[str] = Counter()
"""How many conversions were entered for each set of ranks: the next one is the same one on every rank."""


def _check_ranks(layers: list[Float8Linear], group: dist.ProcessGroup, device: str) -> None:
    """Compare what was converted, and how, across the ranks that are about to exchange codes or gradients.

    Raises:
        Float8RankMismatchError: on every rank alike, with the ranks and the first layer that differ.
    """
    mine = [_description(layer) for layer in layers]
    digest = hashlib.sha256(json.dumps(mine).encode()).digest()
    sent = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    world = dist.get_world_size(group)
    received = [torch.empty_like(sent) for _ in range(world)]
    dist.all_gather(received, sent, group=group)
    if all(bytes(theirs.tolist()) == digest for theirs in received):
        return
    everyone: list[list[dict[str, str]]] = [[] for _ in range(world)]
    dist.all_gather_object(everyone, mine, group=group)
    ranks = dist.get_process_group_ranks(group)
    raise Float8RankMismatchError(_difference(dict(zip(ranks, everyone, strict=True))))


def _difference(everyone: dict[int, list[dict[str, str]]]) -> str:
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
            f"ranks were converted differently. {layers[0]['layer']}: {sides}. Call convert_to_float8 with the same "
            "arguments on every rank, and install the same f8sub"
        )
    raise RuntimeError("ranks whose digests differ describe the same layers")


def _description(layer: Float8Linear) -> dict[str, str]:
    weight = layer.weight
    plan = layer.plan
    return {
        "layer": layer.fqn,
        "f8sub": __version__,
        "shape": str(tuple(weight.shape)),
        "dtype": str(weight.dtype),
        "recipe": plan.recipe.name,
        **{gemm: _read(getattr(plan.recipe, gemm)) for gemm in ("fprop", "dgrad", "wgrad")},
        "amax histories": str(plan.recipe.delayed),
        "backends": f"{plan.fprop}, {plan.dgrad}, {plan.wgrad}",
        "float8_all_gather": str(layer.float8_all_gather),
        "keep_x": layer.keep_x,
        "primary_weights": str(layer.converted.primary_weights),
    }


def _read(spec: GemmSpec) -> str:
    return f"{spec.a} by {spec.b}, fast_accum={spec.fast_accum}" if spec.a else "high precision"
