"""What a reduction finds that is worth telling: NaN, infinity, and weights that changed on some ranks only."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from f8sub.errors import Float8NumericsError, Float8Warning
from f8sub.features.delayed.state import OPERANDS, W
from f8sub.weights.host_copy import HostCopy
from f8sub.weights.record import WeightRecord
from f8sub.weights.shard import Shard

if TYPE_CHECKING:
    from f8sub.weights.conversion import Conversion


def sent_to(device: torch.device, values: Sequence[bool] | Sequence[int]) -> torch.Tensor:
    """A tensor of the values on ``device``, which the host does not wait for."""
    dtype = torch.bool if all(isinstance(value, bool) for value in values) else torch.int64
    there = torch.tensor(values, dtype=dtype, device="cpu")
    return there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there.to(device)


class Findings:
    """Of one reduction of a scale table.

    Args:
        amax: the table's amaxes of weights, and as the last entry the lane of one that changed on some ranks.
        shards: the weights.
        met: float32, (layers, 3): not 0 where a layer's x or dy was not finite.
        records: of the weights of these layers.
    """

    def __init__(
        self, amax: torch.Tensor, shards: Sequence[Shard], met: torch.Tensor, records: Sequence[WeightRecord]
    ) -> None:
        self._copy = HostCopy(torch.cat([amax[:-1].isinf(), amax[-1:], met.flatten()]))
        self._weights, self._shards, self._records = len(amax) - 1, shards, records

    def tell(self) -> None:
        """Warn and raise as needed, on every rank alike.

        Raises:
            Float8NumericsError: NaN or infinity in a weight, an x or a dy; names the layers.
        """
        found = self._copy.read()
        if not found.any():
            return
        weights, met = found[: self._weights], found[self._weights + 1 :]
        if (alone := int(found[self._weights])) > 0:
            warnings.warn(
                f"{self._shards[alone - 1].fqn}: its weight changed on some ranks and not on others since scales "
                "were computed; the ranks gathered it with the scales from before the change, and what those could "
                "not hold as NaN, or as the largest code of a format without NaN. Change a sharded weight on every "
                "rank alike, then call precompute_scales(model)",
                Float8Warning,
                stacklevel=5,
            )
        bad = [s.fqn for s in self._shards if weights[s.amax.storage_offset() :][: s.amax.numel()].any()]
        messages = []
        if bad:
            messages.append(bad_weights(bad, "on this or another rank"))
        if met.any():
            operands = operands_met(self._records, met.view(-1, len(OPERANDS)))
            messages += non_finite(operands, self._records[0].conversion)
        if messages:
            raise Float8NumericsError(". ".join(messages))


def bad_weights(fqns: Sequence[str], where: str) -> str:
    """The error that NaN or infinity in the weights of these layers is."""
    return (
        f"NaN or infinity in the master weight of {', '.join(fqns)} ({where}) when scales were last computed; its "
        "float8 codes have been NaN since. Restore the weights from a checkpoint, and look at the gradients of the "
        "optimizer step before: gradient norm, learning rate, loss scale"
    )


def operands_met(records: Sequence[WeightRecord], met: torch.Tensor) -> list[str]:
    """``"dy of layers.1"`` for every entry of ``met``, (layers, 3), that is not 0."""
    return [f"{OPERANDS[column]} of {records[row].fqn}" for row, column in met.nonzero().tolist()]


def non_finite(operands: Sequence[str], conversion: "Conversion | None") -> list[str]:
    """The error that operands are whose amax was left out of the histories, if they are one.

    An x or a dy is a warning only where steps with gradients that are not finite are skipped.
    """
    harmless = [
        o for o in operands if conversion and conversion.step_guards and not o.startswith(OPERANDS[W])
    ]
    if harmless:
        warnings.warn(_left_out(harmless), Float8Warning, stacklevel=6)
    return [_left_out(bad)] if (bad := [o for o in operands if o not in harmless]) else []


def _left_out(operands: Sequence[str]) -> str:
    return (
        f"NaN or infinity in {', '.join(operands)} (on this or another rank) in the last steps; delayed scaling left "
        "those amaxes out of its histories. Look at the data, the learning rate and the loss scale; where such steps "
        "are skipped, as a GradScaler's are, f8sub.skip_step_if_nonfinite(optimizer) makes a warning of this"
    )
