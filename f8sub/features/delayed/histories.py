"""The amax histories of delayed scaling: rolled with an exchange's reduction, or on this rank alone."""

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from f8sub.errors import Float8ConfigError, Float8NumericsError, Float8Warning
from f8sub.features.delayed.layers import state_of, states_of
from f8sub.features.delayed.state import OPERANDS, ScalingState, Staged, W, roll
from f8sub.features.non_finite.held_weights import looked_at, weight_amaxes
from f8sub.kernels.scales import PriorScale
from f8sub.torch_compat import (
    broadcast_no_more,
    graph_task,
    is_capturing,
    no_dispatch_modes,
    running_ddp,
    takes_uneven_inputs,
)
from f8sub.weights.conversion import Conversion, Guest, makers
from f8sub.weights.findings import HostCopy, sent_to
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.ranks import own_group
from f8sub.weights.record import WeightRecord
from f8sub.weights.weight import local_tensor


class Histories:
    """The ``Region`` of the sharded layers of one exchange that keep amax histories.

    Their staged amaxes and flags for NaN and infinity, (2, layers, 3) in all. A weight's amax is the exchange's own,
    and counts where an optimizer stepped the weight. Due once an optimizer step.

    Args:
        guest: of the conversion.
        records: of the layers' weights, with a shard each.
        device: type of the device that gathers.
        rolled_at: the optimizer step that was the last when the histories rolled.
    """

    def __init__(
        self, guest: "DelayedGuest", records: Sequence[WeightRecord], device: str, rolled_at: int
    ) -> None:
        self.size = 2 * len(records) * len(OPERANDS)
        self._guest = guest
        self._records = sorted(records, key=lambda record: record.fqn)
        self._states = [state_of(record.module, record.module.plan.recipe) for record in self._records]
        shared = [state.scaling.reduce_amax for state in self._states]
        self._shared = None if all(shared) else torch.tensor(shared, dtype=torch.bool, device=device)[:, None]
        self.rolled_at = rolled_at
        self._weights = self._own = self._stepped = torch.empty(0, dtype=torch.float32, device=device)

    @property
    def due(self) -> bool:
        """Whether an optimizer stepped, as every rank knows, since the histories rolled last.

        Never in a backward pass: what that recomputes has the forward's scales, though an optimizer steps in it.
        """
        return graph_task() == -1 and self._guest.steps > self._since and not self._loaded_in_place()

    @property
    def _since(self) -> int:
        """The optimizer step that the histories cover."""
        return max(self.rolled_at, self._guest.loaded_at)

    def _loaded_in_place(self) -> bool:
        """Whether something else wrote to the buffers after the last optimizer step, as ``dcp.load`` does.

        What is in them then covers that step.
        """
        written = [state.notice_writes() for state in self._states]
        if any(written):
            self._guest.loaded_at = self._guest.steps
        return any(written)

    def write(self, out: torch.Tensor) -> None:
        """Write what was staged since the last step that is covered."""
        shards = [record.shard for record in self._records if record.shard is not None]
        if not len(self._weights):
            positions = [int(shard.amax.storage_offset()) for shard in shards]
            self._weights = torch.tensor(positions, dtype=torch.int64, device=out.device)
        self._stepped = sent_to(out.device, [_stepped(shard.master, self._since) for shard in shards])
        self._own, met = Staged.of(self._states)
        shared = self._own if self._shared is None else self._own * self._shared
        out.copy_(torch.stack((shared, met)).flatten())
        self.rolled_at = self._guest.steps

    def read(self, reduced: torch.Tensor, weight_amax: torch.Tensor) -> torch.Tensor:
        """Roll with the reduced amaxes.

        Returns:
            float32, (layers * 3,): not 0 where NaN or infinity was met on any rank.
        """
        staged, met = reduced.view(2, -1, 3).clone().unbind()
        if self._shared is not None:
            staged = torch.where(self._shared, staged, self._own)
        weights = weight_amax[self._weights]
        staged[:, W] = weights.where(weights.isfinite() & self._stepped, 0.0)
        roll(self._states, staged)
        return met.flatten()

    def tell(self, found: torch.Tensor) -> list[str]:
        """Errors of operands that were not finite."""
        return self._guest.non_finite(operands_met(self._records, found.view(-1, len(OPERANDS))))


class Replicas:
    """The ranks that DistributedDataParallel keeps copies of the layers on.

    Args:
        ddp: the module whose forward runs. From now on it leaves the amax histories alone: what it broadcasts at
            every forward, rank 0's, has not seen the other ranks' microbatches of this step.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        ranks = tuple(sorted(dist.get_process_group_ranks(ddp.process_group)))
        # Collectives of others cannot cross it.
        self._group = own_group(ranks, next(ddp.module.parameters()).device.type) if len(ranks) > 1 else None
        self._ddp = weakref.ref(ddp)
        states = ((n, m) for n, m in ddp.module.named_modules() if isinstance(m, ScalingState))
        broadcast_no_more(ddp, [f"{name}.{buffer}" for name, state in states for buffer in state._buffers])

    def share(self, held: Sequence[tuple[WeightRecord, ScalingState]], staged: Staged) -> None:
        """Make of what was staged what was staged on any rank; of a context's recipe each rank keeps its own.

        Only this rank may have entered that context.

        Raises:
            Float8ConfigError: within ``ddp.join()``: ranks that have no more inputs step no optimizer, and the others
                would wait for them.
        """
        if (ddp := self._ddp()) is not None and takes_uneven_inputs(ddp):
            raise Float8ConfigError(
                f"{held[0][0].fqn}: its amax histories are shared by DDP's ranks at every optimizer step, and inside "
                "of ddp.join() ranks may step differently often; give every rank as many batches, or take a recipe "
                "with current scaling"
            )
        own = [row for row, (record, state) in enumerate(held) if state.recipe == record.module.plan.recipe]
        rows = slice(None) if len(own) == len(held) else own
        together = torch.stack([part[rows] for part in staged])
        if self._group is not None:
            dist.all_reduce(together, dist.ReduceOp.MAX, group=self._group.of_next_call())
        amax, non_finite = together.unbind()
        shared = [held[row][1].scaling.reduce_amax for row in own]
        if not all(shared):
            amax = torch.where(sent_to(amax.device, shared)[:, None], amax, staged.amax[rows])
        staged.amax[rows], staged.non_finite[rows] = amax, non_finite


class LocalHistories:
    """The amax histories of layers that are not sharded: of this rank alone, or of DDP's replicas.

    Attributes:
        replicas: those, once DDP ran the layers.
    """

    def __init__(self) -> None:
        self.replicas: Replicas | None = None
        self._copy: tuple[list[WeightRecord], HostCopy] | None = None
        self._met: list[str] = []

    def roll(self, held: Sequence[tuple[WeightRecord, ScalingState]], since: int) -> None:
        """Roll by what was staged, and by the weights as they are.

        Args:
            held: records, each with a state of its layer. A weight that this rank does not see whole stays without a
                scale of its past.
            since: the optimizer step that was the last when the histories rolled before.

        Raises:
            Float8ConfigError: a CUDA graph is captured: replays would not know which weights an optimizer stepped.
        """
        if not held:
            return
        if is_capturing(held[0][1].scale):
            raise Float8ConfigError(
                f"{held[0][0].fqn}: an optimizer steps its weight while a CUDA graph is captured, and the amax "
                "histories of delayed scaling roll outside of graphs; capture forward and backward alone, or take a "
                "recipe with current scaling"
            )
        if self._copy is not None:
            self._read()
        records, states = [record for record, _ in held], [state for _, state in held]
        staged, met = both = Staged.of(states)
        with torch.no_grad():
            if self.replicas is not None:
                self.replicas.share(held, both)
            weights = [local_tensor(getattr(record.module, record.name)) for record in records]
            counts = [
                not record.entered and _stepped(weight, since)
                for record, weight in zip(records, weights, strict=True)
            ]
            amaxes = weight_amaxes(weights).to(staged)
            staged[:, W] = amaxes.where(amaxes.isfinite() & sent_to(staged.device, counts), 0.0)
            met[:, W] = (~amaxes.isfinite()).float()
            self._copy = records, HostCopy(met)
            roll(states, staged)

    def non_finite(self) -> list[str]:
        """What NaN or infinity was met in, as far as is known without waiting; each is told once."""
        if self._copy is not None and self._copy[1].there:
            self._read()
        met, self._met = self._met, []
        return met

    def _read(self) -> None:
        if self._copy is not None:
            records, copy = self._copy
            with no_dispatch_modes():
                self._met += operands_met(records, copy.read())
            self._copy = None


class DelayedGuest(Guest):
    """The ``Guest`` of the conversion: rolls the histories of its layers, once an optimizer step.

    Attributes:
        loaded_at: the conversion's optimizer steps when a state dict was loaded last, which covers those.
    """

    def __init__(self, conversion: Conversion) -> None:
        self.loaded_at = 0
        self._conversion = weakref.ref(conversion)
        self._local = LocalHistories()
        self._rolled_at = 0

    @property
    def steps(self) -> int:
        """Optimizer steps of the conversion's weights so far."""
        conversion = self._conversion()
        return 0 if conversion is None else conversion.steps

    @property
    def is_needed(self) -> bool:
        """Whether any layer keeps histories."""
        return any(self._states_of(record) for record in self._records())

    def prior_of(self, record: WeightRecord) -> Callable[[], PriorScale] | None:
        """The weight's scale of its history."""
        if not states_of(record.module):
            return None
        recipe = record.module.plan.recipe
        return None if recipe.delayed is None else functools.partial(state_of(record.module, recipe).prior, W)

    def region(self, records: Sequence[WeightRecord], device: str, before: Any) -> Histories | None:
        """Of the layers that keep histories under their own recipe."""
        with_histories = [r for r in records if r.shard is not None and r.shard.prior is not None]
        rolled_at = 0 if before is None else before.rolled_at
        return Histories(self, with_histories, device, rolled_at) if with_histories else None

    def forward(self) -> bool:
        """Have the ranks of DDP share what the histories see, if DDP runs the layers now.

        Returns:
            Whether there is no more to wait for: they do, or FSDP2 shards the layers.
        """
        conversion = self._conversion()
        is_sharded = conversion is not None and conversion.is_sharded
        if self._local.replicas is None and not is_sharded and (ddp := running_ddp()) is not None:
            self._local.replicas = Replicas(ddp)
        return is_sharded or self._local.replicas is not None

    def loaded(self) -> None:
        """What was loaded covers the steps before."""
        self.loaded_at = self.steps

    def before_count(self) -> None:
        """Notice what was loaded in place before this step: it does not cover it."""
        for record in self._records():
            for state in self._states_of(record):
                state.notice_writes()

    def counted(self) -> None:
        """Roll the histories that no all-gather will ask for.

        Not during a backward pass, see ``Histories.due``; the next call does it.
        """
        conversion, since = self._conversion(), max(self._rolled_at, self.loaded_at)
        if conversion is None or self.steps <= since or graph_task() != -1:
            return
        self._rolled_at = self.steps
        if not self.is_needed:
            return
        conversion.refresh()
        conversion.reduce_regions()
        held = [
            (record, state)
            for record in conversion
            for state in self._states_of(record)
            if record.shard is None or state.recipe != record.module.plan.recipe
        ]
        self._local.roll(held, since=since)
        looked_at(conversion, [record for record, _ in held])

    def precompute(self) -> None:
        """Roll what is left, and tell of NaN and infinity that this rank met in layers that are not sharded.

        Raises:
            Float8NumericsError: with the layers and operands.
        """
        self.counted()
        for message in self.non_finite(self._local.non_finite()):
            raise Float8NumericsError(message)

    def non_finite(self, operands: Sequence[str]) -> list[str]:
        """The error that operands are whose amax was left out of the histories, if they are one.

        An x or a dy is a warning only where steps with gradients that are not finite are skipped.
        """
        conversion = self._conversion()
        skips = conversion is not None and len(conversion.step_guards) > 0
        harmless = [o for o in operands if skips and not o.startswith(OPERANDS[W])]
        if harmless:
            warnings.warn(_left_out(harmless), Float8Warning, stacklevel=8)
        return [_left_out(bad)] if (bad := [o for o in operands if o not in harmless]) else []

    def _records(self) -> list[WeightRecord]:
        conversion = self._conversion()
        return [] if conversion is None else conversion.records

    @staticmethod
    def _states_of(record: WeightRecord) -> list[ScalingState]:
        return [] if record.module is None else states_of(record.module)


makers.append(DelayedGuest)


def _stepped(weight: torch.Tensor, since: int) -> bool:
    """Whether an optimizer stepped the weight after step ``since``; every rank knows that alike."""
    record = (
        weight.record if isinstance(weight, MasterWeight) else None
    )  # where modules share it, of one of them
    return record is not None and record.last_step > since


def operands_met(records: Sequence[WeightRecord], met: torch.Tensor) -> list[str]:
    """``"dy of layers.1"`` for every entry of ``met``, (layers, 3), that is not 0."""
    return [f"{OPERANDS[column]} of {records[row].fqn}" for row, column in met.nonzero().tolist()]


def _left_out(operands: Sequence[str]) -> str:
    return (
        f"NaN or infinity in {', '.join(operands)} (on this or another rank) in the last steps; delayed scaling left "
        "those amaxes out of its histories. Look at the data, the learning rate and the loss scale; where such steps "
        "are skipped, as a GradScaler's are, f8sub.skip_step_if_nonfinite(optimizer) makes a warning of this"
    )
