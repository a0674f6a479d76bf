"""Conversion: the weights of one ``convert_to_float8``, for what they do together."""

import hashlib
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from f8sub.errors import Float8ConfigError, Float8Warning
from f8sub.formats import Float8Format
from f8sub.kernels.gemm.select import Plan, reference_warning
from f8sub.kernels.scales import PriorScale
from f8sub.torch_compat import param_dtypes, resharded_to_part
from f8sub.version import __version__
from f8sub.weights.agreement import all_arrive
from f8sub.weights.exchange import Exchange, Region
from f8sub.weights.layout import ShardLayout, sharded_dims
from f8sub.weights.ranks import check_ranks
from f8sub.weights.record import WeightRecord
from f8sub.weights.shard import Shard
from f8sub.weights.weight import local_tensor, master_of

_SEEN = "float8_seen"
"""Attribute of every module that ``convert_to_float8`` was given."""

Ranks = tuple[dist.ProcessGroup, tuple[int, ...], tuple[int, ...]]
ParamDtypes = dict[tuple[torch.nn.Module, str], torch.dtype | None]


class Guest:
    """What a feature does for the weights of one conversion; a feature overrides what it needs."""

    @property
    def is_needed(self) -> bool:
        """Whether the model's forwards have to be seen."""
        return False

    def prior_of(self, record: WeightRecord) -> Callable[[], PriorScale] | None:
        """What makes the weight's scale together with its amax, (1, 1); None for the amax alone."""
        return None

    def region(self, records: Sequence[WeightRecord], device: str, before: Region | None) -> Region | None:
        """A region for the exchange of these sharded weights.

        Args:
            records: of the weights.
            device: type of the device that gathers.
            before: the guest's region of the exchange while it had fewer weights.
        """
        return None

    def forward(self) -> bool:
        """A forward of the model begins; whether the guest has seen all of them that it needs."""
        return True

    def loaded(self) -> None:
        """A state dict was loaded into a module of the conversion."""

    def before_count(self) -> None:
        """An optimizer step of some of the weights is about to be counted."""

    def counted(self) -> None:
        """It was counted."""

    def precompute(self) -> None:
        """``precompute_scales`` is called, before anything is reduced; where a guest counts steps.

        Raises:
            Float8NumericsError: the guest knows of NaN or infinity.
        """

    def requested(self) -> None:
        """``precompute_scales`` began all reductions.

        Raises:
            Float8NumericsError: the guest knows of NaN or infinity.
        """


MakeGuest = Callable[["Conversion"], Guest]

makers: list[MakeGuest] = []
"""What features have added: called once a conversion."""


class Conversion:
    """All weights of one ``convert_to_float8`` call, in an order that every rank agrees on.

    Holds no module alive. A deep copy or a pickle of the model makes one of its own, which its layers enter as they
    are made.

    Attributes:
        primary_weights: whether the weights become float8 once an optimizer has their masters.
        idle_patterns: patterns of options that decide for none of the layers, with reasons.
        changes: number of events that changed the weights on every rank alike: optimizer steps, load_state_dict.
        steps: number of optimizer steps among them.
        step_guards: what skips steps whose gradients are not finite; each lives with its optimizer.
        is_sharded: whether FSDP2 or tensor parallelism shards any of the weights.
        exchanges: one for each process group that gathers weights, set of ranks that share their scales, and set of
            all ranks that hold them.
    """

    made: ClassVar[int] = 0
    """How many there are or were: a module that was walked for them before the last one is walked again."""

    counts_steps: ClassVar[bool] = False
    """Whether a guest of any conversion asks for optimizer steps: until then this is all that their end reads."""

    def __init__(self, primary_weights: bool = False, idle_patterns: tuple[str, ...] = ()) -> None:
        Conversion.made += 1
        self.primary_weights = primary_weights
        self.idle_patterns = idle_patterns
        self._records: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, WeightRecord]] = (
            weakref.WeakKeyDictionary()
        )
        self._unsharded: dict[WeightRecord, None] = {}
        self._shards: dict[WeightRecord, Shard] = {}
        self.changes = 0
        self.steps = 0
        self.step_guards: weakref.WeakSet[Any] = weakref.WeakSet()
        self.is_sharded = self._told_of_reference = False
        self.exchanges: dict[Ranks, Exchange] = {}
        self.guests: list[Guest] = [make(self) for make in makers]

    def __reduce__(self) -> tuple[Any, ...]:
        return Conversion, (self.primary_weights, self.idle_patterns)

    @staticmethod
    def see(model: torch.nn.Module) -> None:
        """Mark a model, and each part of it, as one that ``convert_to_float8`` was given, if only to leave it alone."""
        for module in model.modules():
            module.__dict__[_SEEN] = True  # copies for pipeline stages keep it

    @staticmethod
    def forget(model: torch.nn.Module) -> None:
        """Take the mark off again."""
        Conversion.made += 1
        for module in model.modules():
            module.__dict__.pop(_SEEN, None)

    @staticmethod
    def saw(model: torch.nn.Module) -> bool:
        """Whether any part of the model was given to ``convert_to_float8``."""
        return any(_SEEN in module.__dict__ for module in model.modules())

    def add(
        self, module: torch.nn.Module, name: str, fqn: str, format: Float8Format | None, gathered: bool
    ) -> WeightRecord:
        """Enter the parameter ``name`` of a module, which is a ``WeightOwner``."""
        record = WeightRecord(self, module, name, fqn, format, gathered)
        self._records.setdefault(module, {})[name] = record
        self._unsharded[record] = None
        return record

    def discard(self, module: torch.nn.Module) -> None:
        """Take a module's weights out."""
        for record in self._records.pop(module, {}).values():
            self._unsharded.pop(record, None)

    def owns(self, module: torch.nn.Module) -> bool:
        """Whether weights of ``module`` are among these."""
        return module in self._records

    def record_of(self, module: torch.nn.Module, name: str) -> WeightRecord:
        """The record of a module's parameter."""
        return self._records[module][name]

    @property
    def records(self) -> list[WeightRecord]:
        """The weights of modules that are alive, in no order."""
        return [record for of_module in self._records.values() for record in of_module.values()]

    def __iter__(self) -> Iterator[WeightRecord]:
        return iter(sorted(self.records, key=lambda record: record.fqn))

    def warn_of_reference(self, plans: Iterable[Plan]) -> None:
        """Warn once a conversion where GEMMs on a GPU fall to the reference backend, see ``reference_warning``."""
        if not self._told_of_reference and (message := reference_warning(plans)):
            self._told_of_reference = True
            warnings.warn(message, Float8Warning, stacklevel=4)

    def refresh(self, *, asked: bool = False) -> None:
        """Enter the weights that were sharded since the last look.

        Which weights those are, every rank knows; that a known one got another local tensor, one rank alone may
        (FSDP2 pads the short shards anew), so that is looked at where nothing is communicated.

        Args:
            asked: this is because of a call that a rank may have forgotten, so nothing is begun together before
                all ranks came. Else it is before an all-gather, which no rank can forget.
        """
        new = [(record, record.parameter) for record in self._unsharded if not record.entered]
        if sharded := [(record, w) for record, w in new if isinstance(w, DTensor) and sharded_dims(w)]:
            self._enter(sorted(sharded, key=lambda each: each[0].fqn), asked)
        for record, shard in self._shards.items():
            shard.follow(record)

    def shard_of(self, record: WeightRecord) -> Shard:
        """The shard of a weight that is about to be gathered.

        Raises:
            Float8ConfigError: the module's parameter is not what is gathered.
        """
        if not record.entered:
            self.refresh()
        if record.shard is None:
            raise Float8ConfigError(
                f"{record.fqn}: its weight is gathered but is not a sharded parameter of the layer "
                f"({type(record.parameter).__name__}); assign weights before fully_shard"
            )
        record.shard.follow(record)
        return record.shard

    def loaded(self) -> None:
        """Enter that a state dict was loaded into one of the modules."""
        self.changes += 1
        for guest in self.guests:
            guest.loaded()

    def count_step(self, records: Iterable[WeightRecord]) -> None:
        """Enter that an optimizer has just stepped these weights."""
        for guest in self.guests:
            guest.before_count()
        self.steps += 1
        for record in records:
            record.last_step = self.steps

    def reduce_regions(self) -> None:
        """Reduce the guests' regions that are due and that no all-gather will ask for."""
        for exchange in self.exchanges.values():
            exchange.reduce_regions()

    def settle(self) -> None:
        """Reduce what is due and finish what is under way, before a state dict of guests is taken or loaded."""
        for exchange in self.exchanges.values():
            exchange.settle_for_state_dict()

    @property
    def unsharded(self) -> Iterable[WeightRecord]:
        """The weights that no exchange covers."""
        return self._unsharded

    def _enter(self, new: list[tuple[WeightRecord, DTensor]], asked: bool) -> None:
        _refuse_partly_resharded([record for record, _ in new])
        layouts = {record: ShardLayout.of(weight, record.fqn) for record, weight in new}
        dtypes = param_dtypes(record.module for record, _ in new)
        for key in dict.fromkeys(map(_ranks_of, layouts.values())):
            members = [record for record, _ in new if _ranks_of(layouts[record]) == key]
            layout = layouts[members[0]]
            exchange = self.exchanges.get(key) or Exchange(self, layout)
            if not self._compared(members, layout, dtypes, exchange, asked):
                continue
            self.is_sharded = True
            for record in members:
                record.entered = True
                if shard := self._shard(record, layouts[record], dtypes, exchange):
                    self._shards[record] = record.shard = shard
                    del self._unsharded[record]
            if ours := [record for record, shard in self._shards.items() if shard.exchange is exchange]:
                self.exchanges[key] = exchange
                alive = (record for record in ours if record.module is not None)
                exchange.set_records(sorted(alive, key=lambda record: record.fqn))

    def _compared(
        self,
        members: list[WeightRecord],
        layout: ShardLayout,
        dtypes: ParamDtypes,
        exchange: Exchange,
        asked: bool,
    ) -> bool:
        """Compare weights across the ranks that hold them; False where ``asked`` and some rank did not come.

        Raises:
            Float8RankMismatchError: ranks that were converted differently.
        """
        ranks, world = hashlib.sha256(str(layout.ranks).encode()).hexdigest(), len(layout.ranks)
        if world > 1:
            if asked and not all_arrive(f"f8sub/{ranks}/enter/{_entered[ranks]}", world):
                return False
            described = [
                {
                    "layer": record.fqn,
                    "f8sub": __version__,
                    **record.module.weight_described(record.name, torch.device(layout.device)),
                    "param_dtype": str(dtypes.get((record.module, record.name))),
                }
                for record in members
            ]
            check_ranks(described, exchange.group_of(layout.ranks).of_next_call(), layout.device)
            if len(layout.sharers) > 1:
                exchange.group_of(layout.sharers)  # now, when all of them are here
        _entered[ranks] += 1
        return True

    def _shard(
        self, record: WeightRecord, layout: ShardLayout, dtypes: ParamDtypes, exchange: Exchange
    ) -> Shard | None:
        """The shard of a weight that is gathered as float8 or has a prior scale; None of any other."""
        gathered_by = record.module, record.name
        sent = record.gathered and gathered_by in dtypes
        prior = next((prior for guest in self.guests if (prior := guest.prior_of(record))), None)
        if not sent and prior is None:
            return None
        local, format = local_tensor(record.module._parameters[record.name]), record.format
        master = master_of(local)
        if master is None or (sent and not hasattr(local, "fsdp_pre_all_gather")):
            raise Float8ConfigError(
                f"{record.fqn}: FSDP2 would gather its weight in high precision, because it is a "
                f"{type(local).__name__} that took the converted weight's place; assign weights before "
                "convert_to_float8, or copy into them"
            )
        if sent and format is not None:
            if format.codes_per_byte > 1 and layout.dim != 0:
                raise Float8ConfigError(
                    f"{record.fqn}: its weight is sharded by columns (Shard({layout.dim})), which FSDP2 "
                    f"puts together from one byte an element, and {format} has two in one; "
                    "shard it by rows, or convert with float8_all_gather=False"
                )
            layout.check_lines_up(format.tile, record.fqn)
        if master.cell.record is None or master.cell.record.conversion is None:
            master.cell.record = record  # else of another module's weight that is tied to this one
        tied = next((shard for shard in self._shards.values() if shard.master.cell is master.cell), None)
        return tied or Shard(record, master, layout, dtypes.get(gathered_by), exchange, prior, sent=sent)


def _ranks_of(layout: ShardLayout) -> Ranks:
    return layout.group, layout.sharers, layout.ranks


def _refuse_partly_resharded(records: list[WeightRecord]) -> None:
    """FSDP2 gathers anew what it kept of a weight after forward, without the hooks that would say what it is."""
    found = resharded_to_part(record.module for record in records if record.gathered)
    if fqns := sorted({record.fqn for record in records if record.module in found}):
        raise Float8ConfigError(
            f"{fqns[0]} and {len(fqns) - 1} more: sharded with reshard_after_forward=<int>, which FSDP2 does not do "
            "for weights with all-gather hooks (torch raises NotImplementedError in backward); pass True or False to "
            "fully_shard, or convert with float8_all_gather=False"
        )


_entered: Counter[str] = Counter()
"""How many conversions were entered for each set of ranks: the next one is the same one on every rank."""
