"""Rolls histories together, in rows: one per layer, or one for each matrix of a stack.

Has the ranks on which DistributedDataParallel keeps copies of layers, too, and maxima over them.
"""

import functools
import weakref
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from f8sub.delayed.state import OPERANDS, ScalingState, W, roll, sizes_of
from f8sub.errors import Float8ConfigError
from f8sub.host_copy import constant
from f8sub.torch_compat import is_joining, leave_buffers
from f8sub.weights.agreement import own_group
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.weight import WeightRecord

Held = tuple[WeightRecord, ScalingState]


class Histories:
    """Rolls histories together: takes what this rank staged, and rolls with what all ranks staged."""

    def __init__(self, held: Sequence[Held]) -> None:
        self.records = [record for record, _ in held]
        self.states = [state for _, state in held]
        self.sizes = sizes_of(self.states)
        self._own = torch.empty(0, dtype=torch.float32, device="cpu")

    @functools.cached_property
    def names(self) -> list[str]:
        """The name of each row: a layer's, or that of one matrix of a stack."""
        return [
            record.fqn if state.members is None else f"{record.fqn}[{index}]"
            for record, state, size in zip(self.records, self.states, self.sizes, strict=True)
            for index in range(size)
        ]

    @functools.cached_property
    def _layer_of_row(self) -> torch.Tensor:
        numbers = [number for number, size in enumerate(self.sizes) for _ in range(size)]
        return constant(self._own.device, numbers)

    def by_row(self, values: Sequence[bool]) -> torch.Tensor:
        """Return each layer's value for all of its rows: bool, (rows,)."""
        # One copy to the device, cached by value: the same layers step every time.
        sent = constant(self._own.device, values)
        return sent if len(self.names) == len(values) else sent[self._layer_of_row]

    @functools.cached_property
    def _reduced(self) -> torch.Tensor | None:
        """The rows whose amaxes are the maximum over the ranks, bool, (rows, 1); None where all are."""
        reduced = [state.scaling.reduce_amax for state in self.states]
        return None if all(reduced) else self.by_row(reduced)[:, None]

    def take(self) -> torch.Tensor:
        """Take what was staged since the last roll: amaxes, and 1 for NaN and infinity; float32, (2, rows, 3).

        A layer has a row, a stack of matrices one for each.
        """
        amaxes = [history[0] for state in self.states for history in state.histories]
        non_finite = [flag for state in self.states for flag in state.flags]
        if all(state.members is None for state in self.states):
            # [amaxes | flags, layers, x w dy]: both are stored as x, w, dy of each layer in turn.
            self._own = torch.stack([*amaxes, *non_finite]).view(2, -1, 3)
            return self._own
        # Stacks have several rows each, so rows are joined operand by operand.
        of_operands = [
            torch.cat([entry.view(-1) for entry in entries[operand::3]])
            for entries in (amaxes, non_finite)
            for operand in range(3)
        ]
        self._own = torch.stack(of_operands).view(2, 3, -1).transpose(1, 2).contiguous()
        return self._own

    def roll(self, staged: torch.Tensor, weights: torch.Tensor, stepped: torch.Tensor) -> torch.Tensor:
        """Roll with the amaxes of all ranks, and of the weights.

        Args:
            staged: the maximum of what the ranks took; written to.
            weights: float32, (rows,): the weights' amaxes.
            stepped: bool, (rows,): whether a weight's amax counts, because an optimizer stepped the weight.

        Returns:
            float32, (rows, 3): not 0 where NaN or infinity was staged.
        """
        amaxes, non_finite = staged.unbind()
        if self._reduced is not None:
            # ``reduce_amax=False``: such a layer scales by this rank's amaxes alone.
            amaxes = torch.where(self._reduced, amaxes, self._own[0])
        # w is staged by nobody: its amax comes with the exchange's reduction, or from ``weight_amaxes``.
        amaxes[:, W] = weights.where(weights.isfinite() & stepped, 0.0)
        roll(self.states, amaxes)
        return non_finite


def matrices_of(weight: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the matrices of a stack, or the weight itself."""
    if weight.dim() != 3:
        return (weight,)
    return (weight.plain if isinstance(weight, MasterWeight) else weight.detach()).unbind(0)


def operands_met(names: Sequence[str], non_finite: torch.Tensor) -> list[str]:
    """Return ``"dy of layers.1"`` for every entry of ``non_finite``, (rows, 3), that is not 0."""
    return [f"{OPERANDS[column]} of {names[row]}" for row, column in non_finite.nonzero().tolist()]


class Replicas:
    """Holds the ranks that DistributedDataParallel keeps copies of the layers on.

    From now on DDP leaves these buffers alone. It would broadcast rank 0's at every forward, and those have not seen
    the other ranks' microbatches of this step.
    """

    def __init__(self, ddp: DistributedDataParallel, buffers: Iterable[str]) -> None:
        ranks = tuple(sorted(dist.get_process_group_ranks(ddp.process_group)))
        # Collectives of others cannot cross it.
        self._group = own_group(ranks, next(ddp.module.parameters()).device.type) if len(ranks) > 1 else None
        # DDP holds the model, whose conversion holds this.
        self._ddp = weakref.ref(ddp)
        leave_buffers(ddp, buffers)

    def maximum(self, staged: torch.Tensor, fqn: str) -> torch.Tensor:
        """Return the maximum over the ranks of what each staged.

        Raises:
            Float8ConfigError: within ``ddp.join()``: ranks that have no more inputs step no optimizer, and the others
                would wait for them.
        """
        if (ddp := self._ddp()) is not None and is_joining(ddp):
            raise Float8ConfigError(
                f"{fqn}: its amax histories are shared by DDP's ranks at every optimizer step, and inside "
                "of ddp.join() ranks may step differently often; give every rank as many batches, or take a recipe "
                "with current scaling"
            )
        # The reduction writes in place, and ``staged`` is this rank's own, which ``reduce_amax=False`` reads.
        maximum = staged.clone(memory_format=torch.contiguous_format)
        if self._group is not None:
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self._group.of_next_call())
        return maximum
