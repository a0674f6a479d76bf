"""The amax histories of delayed scaling, which roll once per optimizer step.

    staged on this rank --maximum over the ranks that share the layers--> histories --> scales

Those ranks are an exchange's where the layers are sharded: its reduction takes the amaxes along. They are DDP's where
it keeps replicas of the layers. Otherwise they are this rank alone.
"""

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override

from f8sub.capture import current_capture, host_copy, is_capturing
from f8sub.delayed.rolling import (
    Held,
    Histories,
    Replicas,
    matrices_of,
    operands_met,
)
from f8sub.delayed.state import (
    OPERANDS,
    ScalingState,
    W,
    forget,
    forget_missing,
    state_of,
    states_of,
    take_part,
)
from f8sub.errors import Float8ConfigError, Float8NumericsError, Float8Warning
from f8sub.host_copy import HostCopy
from f8sub.kernels.scales import PriorScale
from f8sub.torch_compat import (
    computing_device,
    graph_task,
    makes_optimizer_state,
    no_dispatch_modes,
    remove_hook,
    running_ddp,
)
from f8sub.weights.conversion import Conversion, Guest, LayerGuest
from f8sub.weights.exchange import Exchange
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.non_finite import HeldWeights, SkippedSteps, weight_amaxes
from f8sub.weights.weight import WeightRecord, local_tensor, own_parameter

_last_steps: weakref.WeakKeyDictionary[WeightRecord, int] = weakref.WeakKeyDictionary()
"""The last optimizer step of its conversion that stepped a weight."""


class _ShardedHistories(Histories):
    """Is the ``Region`` of the sharded layers of one exchange, which reduces their weights' amaxes itself."""

    def __init__(
        self, guest: "DelayedHistories", records: Sequence[WeightRecord], before: "_ShardedHistories | None"
    ) -> None:
        # A row of the table is the same layer on every rank.
        by_name = sorted(records, key=lambda record: record.fqn)
        super().__init__(
            [
                (record, state_of(record.module, record.module._f8sub.plan.recipe, record.name))
                for record in by_name
            ]
        )
        for record, state in zip(self.records, self.states, strict=True):
            if record.shard is not None:
                take_part(state, record.shard.layout)
        # amaxes and flags of x, w and dy for each row
        self.size = 2 * sum(self.sizes) * len(OPERANDS)
        self.rolled_at: int = 0 if before is None else before.rolled_at
        self.asked_at: int = -1 if before is None else before.asked_at
        self._guest = guest
        self._weights: torch.Tensor | None = None
        self._stepped = self._own
        with torch.inference_mode(mode=False):
            self._gate = torch.zeros(1, dtype=torch.bool, device=self.states[0].scale.device)

    @property
    def due(self) -> bool:
        return self._guest.is_due(self.rolled_at) and not self._loaded_in_place()

    def _loaded_in_place(self) -> bool:
        """Return whether something wrote to the buffers after the last optimizer step, and note that it covers it.

        ``dcp.load`` does so.
        """
        written = [state.notice_writes() for state in self.states]
        if any(written):
            # The loaded histories cover all steps so far: to roll now would count the last one twice.
            self._guest.loaded_at = self._guest.steps
        return any(written)

    def write(self, out: torch.Tensor) -> None:
        shards = [record.shard for record in self.records if record.shard is not None]
        if self._weights is None:
            starts = [int(shard.scales.amax.storage_offset()) for shard in shards]
            parts = zip(starts, self.sizes, strict=True)
            # Where each row's weight amax stands in the table; fixed while the table is laid out so.
            positions = [start + index for start, size in parts for index in range(size)]
            self._weights = torch.tensor(positions, dtype=torch.int64, device=out.device)
        out.copy_(self.take().flatten())
        if (capture := current_capture()) is None:
            since = self._guest.covered(self.rolled_at)
            self._stepped = self.by_row([_stepped(shard.master, since) for shard in shards])
        else:
            last = self._guest.steps - 1
            in_last_step = self.by_row([_stepped(shard.master, last) for shard in shards])
            # A graph records one roll. Whether a replay's weights were stepped is on the device, in the gate.
            self._stepped = in_last_step & self._gate
            rolled_at = self.rolled_at
            capture.launch_if(launched_while_unknown(self.states, self._loaded_in_place))
            capture.before_replay(self.set_gate)
            capture.after_replay(self._rolled)
            capture.if_it_fails(lambda: setattr(self, "rolled_at", rolled_at))
        self.rolled_at = self._guest.steps

    def set_gate(self) -> None:
        """Set whether the weights' amaxes count in the next replay, which always rolls: after an optimizer step."""
        self._gate.fill_(self.due)

    def _rolled(self) -> None:
        """Note that a replay rolled."""
        self.rolled_at = self._guest.steps
        for state in self.states:
            state.mark_rolled()

    def read(self, reduced: torch.Tensor, weight_amax: torch.Tensor) -> torch.Tensor:
        # A copy: the roll writes to it, and the table is the exchange's.
        return self.roll(reduced.view(2, -1, 3).clone(), weight_amax[self._weights], self._stepped).flatten()

    def all_settle(self, exchange: Exchange) -> bool:
        """Return whether all ranks came here since the last optimizer step; asked once, not for every layer."""
        ranks, step = exchange.layout.ranks, self._guest.steps
        if len(ranks) == 1 or self.asked_at == step:
            return len(ranks) == 1
        self.asked_at = step
        if exchange.all_arrive(ranks, "settle", step):
            return True
        warnings.warn(
            f"{exchange.table.shards[0].fqn}: a state dict was taken or loaded on some ranks only, after an optimizer "
            "step and before precompute_scales(model); it lacks what the amax histories saw in that step. Call "
            "precompute_scales(model) first, or take it on every rank",
            Float8Warning,
            stacklevel=2,
        )
        return False

    def report(self, found: torch.Tensor) -> list[str]:
        return self._guest.errors_of(operands_met(self.names, found.view(-1, len(OPERANDS))))


def launched_while_unknown(
    states: Sequence[ScalingState], notice: Callable[[], object] | None
) -> Callable[[], str | None]:
    """Say why a step is launched: a graph has as a constant which layers have scales, and others may be loaded.

    Args:
        states: that a graph reads.
        notice: looks for writes to their buffers; None for one that looks at each state alone.
    """
    known = [state.is_known for state in states]

    def reason() -> str | None:
        if notice is not None:
            notice()
        else:
            for state in states:
                state.notice_writes()
        return None if known == [state.is_known for state in states] else "amax histories were loaded"

    return reason


class DelayedHistories(Guest):
    """Rolls the histories of a conversion's layers, once per optimizer step: its ``Guest``.

    Attributes:
        steps: optimizer steps of the conversion's weights so far.
        loaded_at: ``steps`` when a state dict was loaded last, which covers those.
    """

    def __init__(self, conversion: Conversion) -> None:
        self.steps = self.loaded_at = 0
        # A proxy, because the conversion holds its guests.
        self._conversion: Conversion = weakref.proxy(conversion)
        self._replicas: Replicas | None = None
        self._rolled_at = 0
        self._asked_at: weakref.WeakKeyDictionary[Exchange, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._staged: tuple[list[str], HostCopy] | None = None
        self._non_finite: list[str] = []

    def covered(self, rolled_at: int) -> int:
        """Return the optimizer step that histories cover which rolled at step ``rolled_at``, or were loaded later."""
        return max(rolled_at, self.loaded_at)

    def is_due(self, rolled_at: int) -> bool:
        """Return whether an optimizer stepped, as every rank knows, since histories rolled at step ``rolled_at``.

        Never in a backward pass: what that recomputes has the forward's scales, though an optimizer steps in it.
        """
        return graph_task() == -1 and self.steps > self.covered(rolled_at)

    @override
    def prior_of(self, record: WeightRecord) -> Callable[[], PriorScale] | None:
        if not states_of(record.module, record.name):
            return None
        recipe = record.module._f8sub.plan.recipe
        if recipe.delayed is None:
            return None
        # Asked at each reduction: the state's buffers may have moved to another device.
        return functools.partial(state_of(record.module, recipe, record.name).prior, W)

    @override
    def region(self, records: Sequence[WeightRecord], before: Any) -> _ShardedHistories | None:
        with_histories = [r for r in records if r.shard is not None and r.shard.prior is not None]
        return _ShardedHistories(self, with_histories, before) if with_histories else None

    def saw_forward(self) -> bool:
        """Have DDP's ranks share histories, if it runs the layers now; return whether they do or FSDP2 shards them."""
        is_sharded = len(self._conversion.exchanges) > 0
        if self._replicas is None and not is_sharded and (ddp := running_ddp()) is not None:
            states = ((n, m) for n, m in ddp.module.named_modules() if isinstance(m, ScalingState))
            buffers = [f"{name}.{buffer}" for name, state in states for buffer in state._buffers]
            self._replicas = Replicas(ddp, buffers)
        return is_sharded or self._replicas is not None

    @override
    def loaded(self) -> None:
        self.loaded_at = self.steps

    def before_state_dict(self) -> None:
        """Roll what is due, if all ranks take or load a state dict now, and finish the roll under way."""
        for exchange in self._conversion.exchanges.values():
            region = exchange.table.regions.get(self)
            if isinstance(region, _ShardedHistories):
                # Only if all ranks take a state dict: on some of them alone the reduction would wait for the others.
                if region.due and region.all_settle(exchange):
                    exchange.reduce(report=False)
                exchange.settle()

    @override
    def stepped(self, weights: Sequence[torch.Tensor]) -> None:
        # Torch steps with rates of 0 to make states: no amax of such a step is a new one.
        if makes_optimizer_state():
            return
        # What was loaded in place before this step does not cover it.
        for _, state in self.held():
            state.notice_writes()
        self._count(weights)
        if (capture := current_capture()) is not None:
            capture.after_replay(lambda: self._count(weights))
        self._roll_unasked()

    def _count(self, weights: Sequence[torch.Tensor]) -> None:
        self.steps += 1
        for weight in weights:
            if (record := _record_of(weight)) is not None:
                # Weights that no optimizer stepped keep their histories of w.
                _last_steps[record] = self.steps

    def stepped_elsewhere(self, weights: Sequence[torch.Tensor]) -> None:
        """Roll with the others: histories are the same on all ranks."""
        if Conversion.counts_steps:
            self.stepped(weights)

    def _roll_unasked(self) -> None:
        """Roll the histories that no all-gather will ask for; in a backward pass the next call does it."""
        if not self.is_due(self._rolled_at):
            return
        # Before the roll: what follows may come here again.
        since, self._rolled_at = self.covered(self._rolled_at), self.steps
        if not (held := self.held()):
            return
        # Weights that were sharded since may have an exchange now, which rolls them.
        self._conversion.refresh()
        for exchange in self._conversion.exchanges.values():
            # No all-gather brings the ranks together, so they agree: one alone may have stepped.
            if not exchange.gathers and exchange.regions_due:
                if current_capture() is not None:
                    exchange.capture_reduction()
                elif exchange.all_arrive(
                    exchange.layout.ranks, "roll", exchange.opened, self._rolls(exchange)
                ):
                    exchange.reduce(report=False)
                exchange.settle()
        alike = [(r, s) for r, s in held if s.recipe == r.module._f8sub.plan.recipe and r.shard is None]
        # Recipes of ``autocast`` contexts: another rank may not have entered them, so nothing of theirs is reduced.
        of_contexts = [(r, s) for r, s in held if s.recipe != r.module._f8sub.plan.recipe]
        if alike or of_contexts:
            self._roll(alike, of_contexts, since)
        # The roll took these weights' amaxes, and with them whether they are finite.
        self._conversion.guest(HeldWeights).skip(record for record, _ in (*alike, *of_contexts))

    def _rolls(self, exchange: Exchange) -> int:
        """Return the number of this roll since the last backward."""
        opened, count = self._asked_at.get(exchange, (-1, 0))
        self._asked_at[exchange] = exchange.opened, count + 1 if opened == exchange.opened else 1
        return self._asked_at[exchange][1]

    def _roll(self, alike: Sequence[Held], of_contexts: Sequence[Held], since: int) -> None:
        """Roll the histories that no exchange reduces, which rolled last at optimizer step ``since``.

        Every replica has ``alike``; ``of_contexts`` are of a context's recipe, which only this rank may have entered.

        Raises:
            Float8ConfigError: a CUDA graph is captured: replays would not know which weights an optimizer stepped.
        """
        histories = Histories([*alike, *of_contexts])
        records, fqn = histories.records, histories.records[0].fqn
        capture = current_capture()
        if is_capturing(histories.states[0].scale) and capture is None:
            raise Float8ConfigError(
                f"{fqn}: an optimizer steps its weight while a CUDA graph is captured, and the amax "
                "histories of delayed scaling roll outside of graphs; capture forward and backward alone, have "
                "f8sub.graph_step capture the whole step, or take a recipe with current scaling"
            )
        if capture is None:
            self._read()
        weights = [local_tensor(getattr(record.module, record.name)) for record in records]
        # A weight that this rank does not see whole stays without a scale of its past.
        stepped = [
            not record.entered and _stepped(weight, since)
            for record, weight in zip(records, weights, strict=True)
        ]
        with torch.no_grad():
            staged = histories.take()
            if self._replicas is not None and alike:
                rows = sum(histories.sizes[: len(alike)])
                shared = self._replicas.maximum(staged[:, :rows], fqn)
                staged = torch.cat((shared, staged[:, rows:]), 1)
            amaxes = weight_amaxes([m for weight in weights for m in matrices_of(weight)]).to(staged)
            non_finite = histories.roll(staged, amaxes, histories.by_row(stepped))
            # No flag is staged for w: its amax tells.
            non_finite[:, W] = (~amaxes.isfinite()).float()
        # Read at the next roll, when it has long been on the host: no step waits for the device.
        staged_now = histories.names, host_copy(non_finite)
        self._staged = staged_now
        if capture is not None:
            capture.launch_if(launched_while_unknown(histories.states, None))
            capture.before_replay(self._report_staged)
            capture.after_replay(lambda: self._rolled(staged_now, histories.states))
            capture.if_it_fails(lambda: setattr(self, "_staged", None))

    def _rolled(self, staged: tuple[list[str], HostCopy], states: Sequence[ScalingState]) -> None:
        """Note that a replay rolled the histories that no exchange reduces."""
        self._rolled_at, self._staged = self.steps, staged
        for state in states:
            state.mark_rolled()

    @property
    @override
    def launched_before_capture(self) -> int:
        """The second step compiles code again for the scales of the first roll, which no graph can hold."""
        return 2 if self.held() else 1

    def before_capture(self) -> None:
        """Read what is on its way to the host, and set the gates of regions."""
        self._report_staged()
        for _, state in self.held():
            state.notice_writes()
        for exchange in self._conversion.exchanges.values():
            region = exchange.table.regions.get(self)
            if isinstance(region, _ShardedHistories):
                region.set_gate()

    def _report_staged(self) -> None:
        self._read()
        self._report()

    def _report(self) -> None:
        operands, self._non_finite = self._non_finite, []
        if any(operand.startswith(OPERANDS[W]) for operand in operands):
            # It looks at no weight that a roll covered, and its error comes again while one is not finite.
            self._conversion.guest(HeldWeights).look_again()
        for message in self.errors_of(operands):
            raise Float8NumericsError(message)

    def _read(self) -> None:
        """Read where the last roll met NaN or infinity."""
        if self._staged is not None:
            names, copy = self._staged
            with no_dispatch_modes():
                self._non_finite += operands_met(names, copy.read())
            self._staged = None

    def precompute(self) -> None:
        """Roll what is left; NaN and infinity that this rank met in unsharded layers are a Float8NumericsError."""
        self._roll_unasked()
        if self._staged is not None and self._staged[1].there and current_capture() is None:
            self._read()
        self._report()

    def errors_of(self, operands: Sequence[str]) -> list[str]:
        """Return the error for operands whose amax was left out of the histories, if it is one.

        An x or a dy is a warning only where steps with gradients that are not finite are skipped.
        """
        skips = len(self._conversion.guest(SkippedSteps).guards) > 0
        harmless = [o for o in operands if skips and not o.startswith(OPERANDS[W])]
        if harmless:
            warnings.warn(_left_out(harmless), Float8Warning, stacklevel=8)
        return [_left_out(bad)] if (bad := [o for o in operands if o not in harmless]) else []

    def held(self) -> list[Held]:
        """Return all states, in an order that every rank agrees on."""
        records = [record for record in self._conversion if record.module is not None]
        return [(record, state) for record in records for state in states_of(record.module, record.name)]


class DelayedLayers(LayerGuest):
    """Creates, loads and forgets the states of layers whose recipe has delayed scaling."""

    @override
    def entered(self, layer: Any) -> None:
        if layer._f8sub.plan.recipe.delayed is not None:
            for name in layer._f8sub.conversion.names_of(layer):
                state_of(layer, layer._f8sub.plan.recipe, name)

    @override
    def left(self, layer: torch.nn.Module) -> None:
        forget(layer)

    @override
    def loaded(self, layer: Any, state_dict: dict[str, Any], prefix: str) -> None:
        for name in layer._f8sub.conversion.names_of(layer):
            forget_missing(layer, name, state_dict, prefix)
            for state in states_of(layer, name):
                state.come_to(computing_device(own_parameter(layer, name)))

    @override
    def alike(self, layer: Any) -> dict[str, str]:
        return {"amax histories": str(layer._f8sub.plan.recipe.delayed)}

    @override
    def converted(self, model: torch.nn.Module, conversion: Conversion) -> None:
        if conversion.guest(DelayedHistories).held():
            model.register_forward_pre_hook(functools.partial(share_histories_hook, conversion))


def share_histories_hook(conversion: Conversion, module: torch.nn.Module, args: Any) -> None:
    """Find in a forward pre-hook of a converted model which ranks share its histories; removed once that is known."""
    for guest in () if torch.compiler.is_compiling() else conversion.guests:
        if type(guest) is DelayedHistories and guest.saw_forward():
            remove_hook(share_histories_hook, module)


def _stepped(weight: torch.Tensor, since: int) -> bool:
    """Return whether an optimizer stepped the weight after step ``since``, as every rank knows."""
    record = _record_of(weight)
    return record is not None and _last_steps.get(record, 0) > since


def _record_of(weight: torch.Tensor) -> WeightRecord | None:
    """Return a master weight's record; where modules share it, that of one of them."""
    local = local_tensor(weight)
    return local.record if isinstance(local, MasterWeight) else None


def _left_out(operands: Sequence[str]) -> str:
    return (
        f"NaN or infinity in {', '.join(operands)} (on this or another rank) in the last steps; delayed scaling left "
        "those amaxes out of its histories. Look at the data, the learning rate and the loss scale; where such steps "
        "are skipped, as a GradScaler's are, f8sub.skip_step_if_nonfinite(optimizer) makes a warning of this"
    )
