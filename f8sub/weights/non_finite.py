"""HeldWeights: NaN and infinity in the weights that no exchange covers, found without waiting.

SkippedSteps knows whether steps of a conversion's weights are skipped where a gradient is not finite.
"""

import contextlib
import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from f8sub.capture import current_capture, host_copy, is_capturing
from f8sub.errors import Float8NumericsError
from f8sub.host_copy import HostCopy, constant
from f8sub.weights.amax_table import bad_weights
from f8sub.weights.conversion import Conversion, Guest
from f8sub.weights.master_weight import MasterWeight, State
from f8sub.weights.weight import WeightRecord, local_tensor, master_of


class SkippedSteps(Guest):
    """Knows what skips the steps of a conversion's weights.

    Attributes:
        guards: those that skip them; each lives with its optimizer.
    """

    def __init__(self, conversion: Conversion) -> None:
        self.guards: weakref.WeakSet[Any] = weakref.WeakSet()


FEW = 2048
"""Elements of a weight up to which ``_foreach_norm``, 2.8 ns each on a CPU, is faster than ``aminmax``, 5 us in all."""


class HeldWeights(Guest):
    """Finds NaN and infinity in the weights that a rank holds whole, and in its part of those not gathered as float8.

    Each call of ``precompute_scales`` looks at the weights that changed since the call before, and starts to copy what
    it found to the host. The call after that reports it, so that nothing waits for the device. After an error each call
    waits for what it finds, and reports it at once, until all weights are finite. DDP's replicas are equal, so they all
    report; NaN in a part that one rank alone holds is reported by that rank.
    """

    def __init__(self, conversion: Conversion) -> None:
        # Weakly, because the conversion holds its guests.
        self._conversion = weakref.ref(conversion)
        self._finite: weakref.WeakKeyDictionary[WeightRecord, State] = weakref.WeakKeyDictionary()
        self._looks: list[tuple[list[tuple[weakref.ref[WeightRecord], State]], HostCopy]] = []
        self.raised = False

    def requested(self) -> None:
        """Report what the call before found, and look at the weights that changed since.

        In a CUDA graph that ``graph_step`` captures, each replay looks, and the one after the next reports. In any
        other graph nothing looks: the next call that is not captured does.

        Raises:
            Float8NumericsError: NaN or infinity in a weight; names the layers.
        """
        conversion = self._conversion()
        records = [] if conversion is None else conversion.unsharded
        weights = [weight for record in records if (weight := record.parameter) is not None]
        # Whether a stream is captured does not hang on which of a device's weights asks.
        capturing = any(map(is_capturing, {weight.device: weight for weight in weights}.values()))
        if not records or (capturing and current_capture() is None):
            return
        bad = set() if capturing else self._bad()
        self._look(records)
        if bad or (self.raised and not capturing):
            now = self._bad()
            self.raised = bool(now)
            _raise(bad | now)
        if (capture := current_capture()) is not None:
            # A replay writes to the same host memory, so the same looks are due again after each.
            looks = list(self._looks)
            capture.if_it_fails(lambda: self._looks.clear())
            capture.before_replay(self._report)
            capture.after_replay(lambda: self._looks.extend(looks))

    def before_capture(self) -> None:
        """Report now, because a graph cannot."""
        self._report()

    def look_again(self) -> None:
        """Have the next call look at all weights and report at once: another guest reported some of them."""
        self._finite.clear()
        self.raised = True

    def _report(self) -> None:
        if bad := self._bad():
            self.raised = True
            _raise(bad)

    def _bad(self) -> set[str]:
        """Return the names of the weights that the looks so far found not to be finite."""
        bad = set()
        for weights, copy in self._looks:
            for (reference, state), amax in zip(weights, copy.read().tolist(), strict=True):
                if (record := reference()) is None:
                    continue
                if math.isfinite(amax):
                    self._finite[record] = state
                else:
                    bad.add(record.fqn)
        self._looks = []
        return bad

    def _look(self, records: Iterable[WeightRecord]) -> None:
        """Look at the weights that may have changed since they were found to be finite."""
        on_device = defaultdict(list)
        for record in records:
            if (changed := self._changed(record)) is not None:
                on_device[changed[0].device].append((record, *changed))
        # Whoever looks at many weights is called with gradients, and in inference mode.
        inference = torch.is_inference_mode_enabled()
        with (
            torch.inference_mode(mode=False) if inference else contextlib.nullcontext(),
            torch.no_grad(),
        ):
            for some in on_device.values():
                weights = [(weakref.ref(record), state) for record, _, state in some]
                # Amaxes, not whether they are finite: the host finds that with fewer launches.
                self._looks.append((weights, host_copy(weight_amaxes([master for _, master, _ in some]))))

    def skip(self, records: Iterable[WeightRecord]) -> None:
        """Leave out weights, as they are now, that another guest has just looked at."""
        for record in records:
            if (changed := self._changed(record)) is not None:
                self._finite[record] = changed[1]

    def _changed(self, record: WeightRecord) -> tuple[MasterWeight, State] | None:
        """Return a weight, and its state, that is not known to be finite as it is now."""
        weight = record.parameter
        master = None if weight is None else master_of(local_tensor(weight))
        # A fake or a meta weight has no values.
        if master is None or master.is_meta or master._wrapped is not None:
            return None
        state = master.state
        # The usual case, right after an optimizer step.
        if self._finite.get(record) != state:
            return master, state
        # Writes that bypass dispatch, by a graph's replay or through a state dict's view, leave ``state`` as it is.
        seen = master.owns_storage and not master.cell.replayed
        # That a state dict's view is gone counts as a change.
        return None if seen and master.state == state else (master, master.state)


def _raise(bad: set[str]) -> None:
    if bad:
        raise Float8NumericsError(bad_weights(sorted(bad), "on this rank"))


def weight_amaxes(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the largest magnitude of each weight, (len(weights),), float32; 0 if empty, infinity or NaN as is."""
    plain = [weight.plain if isinstance(weight, MasterWeight) else weight.detach() for weight in weights]
    filled = [row for row, weight in enumerate(plain) if weight.numel()]
    if not filled:
        return torch.zeros(len(plain), dtype=torch.float32, device=plain[0].device)
    found = torch.stack(_largest_of_each([plain[row] for row in filled])).float()
    if len(filled) == len(plain):
        return found
    amaxes = torch.zeros(len(plain), dtype=torch.float32, device=found.device)
    return amaxes.index_copy_(0, constant(amaxes.device, filled), found)


def _largest_of_each(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    if weights[0].is_cpu and sum(weight.numel() for weight in weights) > FEW * len(weights):
        return [torch.maximum(high, -low) for low, high in map(torch.aminmax, weights)]
    return list(torch._foreach_norm(weights, torch.inf))
