"""Conversion: the weights of one ``convert_to_float8``, for what they do together.

``Guest`` takes part in what the weights of a conversion do together, ``LayerGuest`` in what happens to its layers. A
Guest may have a Region, its part of an exchange's table.
"""

import hashlib
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import torch
import torch.distributed as dist

from f8sub.errors import Float8ConfigError
from f8sub.formats import Float8Format
from f8sub.kernels.gemm.select import Plan
from f8sub.kernels.scales import PriorScale
from f8sub.torch_compat import is_dtensor, keep_padded_shards, param_dtypes
from f8sub.weights.agreement import all_arrive
from f8sub.weights.exchange import Exchange
from f8sub.weights.layout import ShardLayout, sharded_dims
from f8sub.weights.shard import Shard
from f8sub.weights.weight import Weight, WeightRecord, conversion_of, local_tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Region(Protocol):
    """A guest's float32 entries in an exchange's table, ``size`` of them; every rank has the same regions."""

    size: int

    @property
    def due(self) -> bool:
        """True if it has something to reduce, as every rank knows."""

    def write(self, out: torch.Tensor) -> None:
        """Write what this rank knows, (size,). The table then takes the maximum over the ranks."""

    def read(self, reduced: torch.Tensor, weight_amax: torch.Tensor) -> torch.Tensor:
        """Take the maximum, (size,), before the scales of the weights are made: it may decide them.

        ``weight_amax`` are the reduced amaxes of all weights, infinity for one that is not finite. Returns float32, of
        one dimension and a constant length: not 0 where there is something to tell.
        """

    def report(self, found: torch.Tensor) -> list[str]:
        """Return the errors for what ``read`` returned, once that came to the host; may warn instead."""


class Guest:
    """Takes part in what the weights of a conversion do together; a subclass overrides what it needs.

    ``before_state_dict``, ``loaded``, ``stepped``, ``precompute`` are called once ``Conversion.counts_steps`` is True.

    Attributes:
        raised: whether it raised Float8NumericsError, and what it told of was not found to be finite since.
    """

    raised: bool = False

    def __init__(self, conversion: "Conversion") -> None:
        """Begin with a conversion that has no weights yet."""

    def described(self) -> dict[str, str]:
        """Return what must be equal on every rank, besides the layers' own descriptions."""
        return {}

    def entered(
        self,
        members: "Sequence[tuple[WeightRecord, ShardLayout]]",
        dtypes: "ParamDtypes",
        exchange: "Exchange",
    ) -> None:
        """Weights are entered that some ranks shard alike, all of which are here; may raise an error on each."""

    def prior_of(self, record: "WeightRecord") -> Callable[[], PriorScale] | None:
        """Return what supplies a prior scale for each tile of the weight; None where the amaxes alone decide."""
        return None

    def region(self, records: "Sequence[WeightRecord]", before: Region | None) -> Region | None:
        """Return a region for the exchange of these sharded weights; ``before`` is the one for fewer of them."""
        return None

    def before_state_dict(self) -> None:
        """A state dict of a module is about to be taken or loaded."""

    def loaded(self) -> None:
        """A state dict was loaded into a module of the conversion."""

    def before_step(self, optimizer: torch.optim.Optimizer, weights: Sequence[torch.Tensor]) -> None:
        """An optimizer is about to step these parameters; may raise Float8ConfigError."""

    def stepped(self, weights: Sequence[torch.Tensor]) -> None:
        """An optimizer has just stepped these parameters."""

    def stepped_others(self) -> None:
        """An optimizer has just stepped a model that ``follow_steps_of`` was given, and none of these parameters."""

    def stepped_elsewhere(self, weights: Sequence[torch.Tensor]) -> None:
        """Another rank stepped these weights, or is late; this one did not, and reduces all regions with it."""

    @property
    def launched_before_capture(self) -> int:
        """Steps that ``graph_step`` launches before it captures one, 1 or more."""
        return 1

    def before_capture(self) -> None:
        """``graph_step`` is about to capture a step; may raise Float8NumericsError."""

    def precompute(self) -> None:
        """``precompute_scales`` begins; may raise Float8NumericsError."""

    def requested(self) -> None:
        """``precompute_scales`` began all reductions; may raise Float8NumericsError."""


class LayerGuest:
    """Takes part in what happens to converted layers; a subclass overrides what it needs.

    A layer is a ``Float8Linear`` or a module of experts.
    """

    def planned(self, conversion: "Conversion", plans: Sequence[Plan]) -> None:
        """Layers of a conversion are to run, or came to a device where they run, by these plans; may warn."""

    def entered(self, layer: torch.nn.Module) -> None:
        """A layer was converted."""

    def left(self, layer: torch.nn.Module) -> None:
        """A layer is what it was again."""

    def converted(self, model: torch.nn.Module, conversion: "Conversion") -> None:
        """The layers of a model were converted."""

    def loaded(self, layer: torch.nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """The layer's entries of a state dict were loaded; called once ``Conversion.counts_steps`` is True."""

    def alike(self, layer: torch.nn.Module) -> dict[str, str]:
        """Return what must be equal on every rank for a layer, by its name in the error."""
        return {}

    def deviation(self, layer: Any) -> str | None:
        """Return what ``repr`` and reports say of a layer that is not as usual; None for one that is."""
        return None


_SEEN = "_f8sub_seen"
"""Attribute of every module that ``convert_to_float8`` was given: the names of its children that were converted."""

Ranks = tuple[dist.ProcessGroup, tuple[int, ...], tuple[int, ...]]
Records = weakref.WeakKeyDictionary[torch.nn.Module, dict[str, WeightRecord]]
Members = Sequence[tuple[WeightRecord, ShardLayout]]
ParamDtypes = dict[tuple[torch.nn.Module, str], torch.dtype | None]
Followed = weakref.WeakKeyDictionary[torch.nn.Module, list["weakref.ref[Conversion]"]]
G = TypeVar("G", bound=Guest)


class Conversion:
    """Holds all weights of one ``convert_to_float8`` call, in an order that every rank shares; keeps no module alive.

    A deep copy or a pickle of the model has a conversion of its own, which its layers enter as they are created.

    Attributes:
        options: the options that features were asked for, by name.
        unsharded: the weights without a shard, as of the last ``refresh``.
        changes: number of events that changed the weights on every rank: optimizer steps, load_state_dict.
        exchanges: by ``group``, ``sharers`` and ``ranks`` of the weights' layouts.
        guests: one of each class that takes part, in the order in which they are called; ``layer_guests`` as well.
    """

    made: ClassVar[int] = 0
    """How many there are or were: a module that was walked for them before the last one is walked again."""

    counts_steps: ClassVar[bool] = False
    """Whether a guest of any conversion asks for optimizer steps: until then this is all that their end reads."""

    followed: ClassVar["Followed"] = weakref.WeakKeyDictionary()
    """Models any of whose parameters' steps count for conversions, see ``follow_steps_of``; in the order of the calls,
    which every rank shares."""

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        guests: Sequence[type[Guest]] = (),
        layer_guests: Sequence[type[LayerGuest]] = (),
    ) -> None:
        # Whoever walked a model for its conversions walks it again.
        Conversion.made += 1
        self.options = options or {}
        self._classes = tuple(guests), tuple(layer_guests)
        self._records: Records = weakref.WeakKeyDictionary()
        self._listed: tuple[int, Sequence[WeightRecord]] = 0, []
        self._kept: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.unsharded: list[WeightRecord] = []
        self.changes = 0
        self.exchanges: dict[Ranks, Exchange] = {}
        self.guests = [guest(self) for guest in guests]
        self.layer_guests = [guest() for guest in layer_guests]

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the records: these refer to modules weakly, and each copied layer enters itself.
        return Conversion, (self.options, *self._classes)

    @staticmethod
    def see(model: torch.nn.Module) -> None:
        """Mark a model, and each part of it, as one that ``convert_to_float8`` was given, if only to leave it alone."""
        for module in model.modules():
            # Copies for pipeline stages keep it.
            module.__dict__[_SEEN] = tuple(
                name for name, child in module.named_children() if conversion_of(child)
            )

    @staticmethod
    def forget(model: torch.nn.Module) -> None:
        """Remove the mark of ``see``."""
        Conversion.made += 1
        for module in model.modules():
            module.__dict__.pop(_SEEN, None)

    @staticmethod
    def saw(model: torch.nn.Module) -> bool:
        """Return whether any part of the model was given to ``convert_to_float8``."""
        return any(_SEEN in module.__dict__ for module in model.modules())

    @staticmethod
    def replaced(model: torch.nn.Module) -> dict[str, str]:
        """Converted modules whose place others with weights took, by name, and the classes of those.

        A module that wraps the converted one is none, nor is an nn.Linear, which is what converting back leaves.
        """
        found: dict[str, str] = {}
        for fqn, module in model.named_modules():
            for name in module.__dict__.get(_SEEN, ()):
                child = module._modules.get(name)
                if (
                    child is None
                    or type(child) is torch.nn.Linear
                    or any(map(conversion_of, child.modules()))
                ):
                    continue
                if any(parameter.dim() > 1 for parameter in child.parameters()):
                    found[f"{fqn}.{name}".lstrip(".")] = f"{type(child).__module__}.{type(child).__name__}"
        return dict(sorted(found.items()))

    def follow_steps_of(self, model: torch.nn.Module) -> None:
        """Have guests hear of steps of all of a model's parameters, because these weights may be frozen, or others'."""
        Conversion.counts_steps = True
        known = [each for each in Conversion.followed.get(model, ()) if each() is not None]
        if not any(each() is self for each in known):
            Conversion.made += 1
            Conversion.followed[model] = [*known, weakref.ref(self)]

    @property
    def alive(self) -> int:
        """The number of modules with weights that are still there."""
        return len(self._records)

    def add(
        self, module: torch.nn.Module, name: str, fqn: str, format: Float8Format | None, gathered: bool
    ) -> WeightRecord:
        """Enter the parameter ``name`` of a module, see ``WeightRecord.module``."""
        record = WeightRecord(self, module, name, fqn, format, gathered)
        # Weak by module, so that a model that nobody uses any more can be freed.
        self._records.setdefault(module, {})[name] = record
        self._listed = 0, []
        return record

    def discard(self, module: torch.nn.Module) -> None:
        """Take a module's weights out."""
        self._records.pop(module, None)

    def owns(self, module: torch.nn.Module) -> bool:
        """Return whether weights of ``module`` are among these."""
        return module in self._records

    def record_of(self, module: torch.nn.Module, name: str) -> WeightRecord:
        """Return the record of a module's parameter."""
        return self._records[module][name]

    def names_of(self, module: torch.nn.Module) -> list[str]:
        """Return the names of a module's weights."""
        return list(self._records[module])

    @property
    def records(self) -> Sequence[WeightRecord]:
        """The weights of modules that are alive, in no order; listed anew where one was added or is gone."""
        # precompute_scales reads this every step: compare one number instead of walking the modules.
        if self._listed[0] != (alive := len(self._records)):
            self._listed = alive, [each for names in self._records.values() for each in names.values()]
        return self._listed[1]

    def __iter__(self) -> Iterator[WeightRecord]:
        # By name, because guests begin collectives while they walk these.
        return iter(sorted(self.records, key=lambda record: record.fqn))

    def guest(self, kind: type[G]) -> G:
        """Return the guest of a feature."""
        return next(guest for guest in self.guests if isinstance(guest, kind))

    @property
    def guests_with_past(self) -> Sequence[Guest]:
        """The guests, once what happens from step to step matters to any; until then a step asks none of them."""
        return self.guests if Conversion.counts_steps else ()

    def refresh(self, *, asked: bool = False, gathered: bool = False) -> None:
        """Enter the weights that were sharded since the last look, which every rank knows.

        With ``asked`` a rank may have forgotten to call this, so nothing is begun together before all ranks came. Else
        this is before an all-gather, which no rank can forget. With ``gathered`` FSDP2 runs
        the model, and has the weights of torch's ``replicate`` too: it alone tells those from others that are whole.
        """
        records = self.records
        new = [(record, record.parameter) for record in records if not record.entered]
        if sharded := [(record, w) for record, w in new if is_dtensor(w) and (gathered or sharded_dims(w))]:
            # By name, the one order that all ranks share: entering a weight begins collectives.
            self._enter(sorted(sharded, key=lambda each: each[0].fqn), asked)
        # One rank alone may have to follow, so nothing is communicated.
        self.unsharded = [record for record in records if not record.follow()]

    def shard_of(self, record: WeightRecord) -> Shard:
        """Return the shard of a weight that is about to be gathered."""
        if not record.entered:
            self.refresh(gathered=True)
        if (shard := record.shard) is None:
            raise Float8ConfigError(
                f"{record.fqn}: its weight is gathered but is not a sharded parameter of the layer "
                f"({type(record.parameter).__name__}); assign before fully_shard. prune needs float8_all_gather=False"
            )
        return shard

    def before_capture(self) -> None:
        """Finish what a CUDA graph of a whole step could not wait for, and tell what is known so far.

        Raises:
            Float8NumericsError: NaN or infinity in a weight.
        """
        self.refresh()
        for exchange in self.exchanges.values():
            exchange.before_capture()
        for guest in self.guests:
            guest.before_capture()

    @property
    def raised(self) -> bool:
        """True from a Float8NumericsError on, until what it told of is found to be finite."""
        return any(e.raised for e in self.exchanges.values()) or any(guest.raised for guest in self.guests)

    def settle(self) -> None:
        """Have guests finish what a state dict holds, which is about to be taken or loaded."""
        for guest in self.guests_with_past:
            guest.before_state_dict()

    def keep_memory(self, module: torch.nn.Module) -> None:
        """Have the memory of a sharded module's weights kept, which a state dict is about to hold."""
        if module not in self._kept and any(map(is_dtensor, module._parameters.values())):
            self._kept.update({module, *keep_padded_shards(self._records)})

    def loaded(self) -> None:
        """Enter that a state dict was loaded into one of the modules."""
        self.changes += 1
        # ``assign=True`` may have brought other memory, which the next state dict has to keep again.
        self._kept.clear()
        for guest in self.guests_with_past:
            guest.loaded()

    def layer_loaded(self, layer: torch.nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """Enter that a layer's entries of a state dict were loaded."""
        for guest in self.layer_guests if Conversion.counts_steps else ():
            guest.loaded(layer, state_dict, prefix)

    def _enter(self, new: Sequence[tuple[WeightRecord, "DTensor"]], asked: bool) -> None:
        """Give shards to weights that were sharded, and exchanges to the shards."""
        # Weights with a past, such as histories of delayed scaling, need an exchange even
        # where FSDP2 gathers high precision.
        past = {record for record, _ in new if any(guest.prior_of(record) for guest in self.guests)}
        needed = any(record.gathered or record in past for record, _ in new)
        dtypes = param_dtypes((record.module for record, _ in new), needed=needed)
        # Tied weights are one storage and so one cell: the second name finds the first one's shard here.
        shards = {shard.master.cell: shard for e in self.exchanges.values() for shard in e.table.shards}
        # Weights with the same three sets of ranks share one table and one all-reduce.
        by_ranks = defaultdict(list)
        for record, weight in new:
            if not sharded_dims(weight) and (record.module, record.name) not in dtypes:
                continue
            layout = ShardLayout.of(weight, record.fqn, apart=record not in past)
            by_ranks[layout.group, layout.sharers, layout.ranks].append((record, layout))
        # Sorted by name before, so every rank comes to the same collectives in the same order.
        for ranks, members in by_ranks.items():
            exchange = self.exchanges.get(ranks) or Exchange(self, members[0][1])
            if not self._checked(members, dtypes, exchange, asked):
                continue
            for record, layout in members:
                record.entered = True
                if shard := self._shard(record, layout, dtypes, exchange):
                    record.shard = shards.setdefault(shard.master.cell, shard)  # tied weights have one
                    local: Any = local_tensor(record.module._parameters[record.name])
                    local.was_sharded(record.shard)
            shared = [record for record in self if (s := record.shard) is not None and s.exchange is exchange]
            if shared:
                self.exchanges[ranks] = exchange
                exchange.set_records(shared)

    def _checked(self, members: Members, dtypes: ParamDtypes, exchange: Exchange, asked: bool) -> bool:
        """Have guests check weights, on all ranks that hold them; False where ``asked`` and some rank did not come."""
        layout = exchange.layout
        # A store's key for these ranks, short for a thousand of them too.
        ranks, world = hashlib.sha256(str(layout.ranks).encode()).hexdigest(), len(layout.ranks)
        if world > 1 and asked and not all_arrive(f"f8sub/{ranks}/enter/{_entered[ranks]}", world):
            return False
        for guest in self.guests:
            guest.entered(members, dtypes, exchange)
        if len(layout.sharers) > 1:
            exchange.group_of(layout.sharers)  # now, when all of them are here
        _entered[ranks] += 1
        return True

    def _shard(
        self, record: WeightRecord, layout: ShardLayout, dtypes: ParamDtypes, exchange: Exchange
    ) -> Shard | None:
        """Return a shard of a weight that is gathered as float8 or has a prior scale; None for any other."""
        gathered_by = record.module, record.name
        sent = record.gathered and gathered_by in dtypes
        prior = next((prior for guest in self.guests if (prior := guest.prior_of(record))), None)
        if not sent and prior is None:
            return None
        local = local_tensor(record.module._parameters[record.name])
        master = local.cast_by_shard if isinstance(local, Weight) else None
        if master is None or (sent and not hasattr(local, "fsdp_pre_all_gather")):
            raise Float8ConfigError(
                f"{record.fqn}: FSDP2 would gather its weight in high precision, because a {type(local).__name__} took "
                "the converted one's place; assign weights before convert_to_float8 or copy into them, or convert "
                "with float8_all_gather=False"
            )
        if master.cell.record is None or master.cell.record.conversion is None:
            master.cell.record = record  # else of another module's weight that is tied to this one
        return Shard(record, master, layout, dtypes.get(gathered_by), exchange, prior, sent=sent)


_entered: Counter[str] = Counter()
"""How many conversions were entered for each set of ranks: the next one is the same one on every rank."""
