"""The amax histories of delayed scaling: rolled with a scale table's reduction, or on this rank alone."""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from f8sub.errors import Float8ConfigError
from f8sub.features.delayed.state import OPERANDS, ScalingState, Staged, W, roll
from f8sub.torch_compat import broadcast_no_more, is_capturing, no_dispatch_modes, takes_uneven_inputs
from f8sub.weights.findings import operands_met, sent_to
from f8sub.weights.groups import own_group
from f8sub.weights.host_copy import HostCopy
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.record import WeightRecord
from f8sub.weights.weight import local_tensor

if TYPE_CHECKING:
    from f8sub.weights.conversion import Conversion


class Histories:
    """The layers of one scale table that keep amax histories.

    Their staged amaxes and flags for NaN and infinity are a part of the table, (2, layers, 3) in all, and so of its
    one all-reduce. A weight's amax is the table's own, and counts where an optimizer stepped the weight.
    """

    def __init__(self, records: Sequence[WeightRecord], device: str) -> None:
        self.records = sorted(records, key=lambda record: record.fqn)
        self.states = [record.module.scaling_state(record.module.plan.recipe) for record in self.records]
        shared = [state.scaling.reduce_amax for state in self.states]
        self._shared = None if all(shared) else torch.tensor(shared, dtype=torch.bool, device=device)[:, None]
        shards = [record.shard for record in self.records if record.shard is not None]
        positions = [shard.amax.storage_offset() for shard in shards]
        self._shards = shards
        self._weights = torch.tensor(positions, dtype=torch.int64, device=device)
        self._own = self._stepped = torch.empty(0, dtype=torch.float32, device=device)

    @staticmethod
    def size(layers: int) -> int:
        """Number of entries in the table."""
        return 2 * layers * len(OPERANDS)

    def loaded_in_place(self, conversion: "Conversion") -> bool:
        """Whether something else wrote to the buffers after the last optimizer step, as ``dcp.load`` does.

        What is in them then covers that step.
        """
        written = [state.notice_writes() for state in self.states]
        if any(written):
            conversion.loaded_at = conversion.steps
        return any(written)

    def take(self, region: torch.Tensor, since: int) -> None:
        """Write what was staged since optimizer step ``since`` into the table's ``region``, (size,)."""
        stepped = [_stepped(shard.master, since) for shard in self._shards]
        self._stepped = sent_to(region.device, stepped)
        self._own, met = Staged.of(self.states)
        shared = self._own if self._shared is None else self._own * self._shared
        region.copy_(torch.stack((shared, met)).flatten())

    def roll(self, region: torch.Tensor, weight_amax: torch.Tensor) -> torch.Tensor:
        """Roll with the reduced ``region``.

        Args:
            region: (size,).
            weight_amax: the table's amaxes of weights; infinity for one that is not finite.

        Returns:
            float32, (layers, 3): not 0 where NaN or infinity was met on any rank.
        """
        staged, met = region.view(2, -1, 3).clone().unbind()
        if self._shared is not None:
            staged = torch.where(self._shared, staged, self._own)
        weights = weight_amax[self._weights]
        staged[:, W] = weights.where(weights.isfinite() & self._stepped, 0.0)
        roll(self.states, staged)
        return met


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
            weights = [local_tensor(record.module._parameters[record.name]) for record in records]
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


def _stepped(weight: torch.Tensor, since: int) -> bool:
    """Whether an optimizer stepped the weight after step ``since``; every rank knows that alike."""
    record = (
        weight.record if isinstance(weight, MasterWeight) else None
    )  # where modules share it, of one of them
    return record is not None and record.last_step > since


def weight_amaxes(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Largest magnitude of each weight, (len(weights),), float32; 0 of an empty one, infinity or NaN as they are."""
    plain = [weight.plain if isinstance(weight, MasterWeight) else weight.detach() for weight in weights]
    filled = [row for row, weight in enumerate(plain) if weight.numel()]
    amaxes = torch.zeros(len(plain), dtype=torch.float32, device=plain[0].device)
    if filled:
        norms = torch._foreach_norm([plain[row] for row in filled], torch.inf)
        amaxes.index_copy_(0, sent_to(amaxes.device, filled), torch.stack([norm.float() for norm in norms]))
    return amaxes
