"""Who takes part in a conversion: Guest in what weights do together, LayerGuest in what happens to layers.

A Guest may have a Region, its part of an exchange's table.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from f8sub.kernels.gemm.select import Plan
from f8sub.kernels.scales import PriorScale

if TYPE_CHECKING:
    from f8sub.weights.conversion import Conversion, ParamDtypes
    from f8sub.weights.exchange import Exchange
    from f8sub.weights.layout import ShardLayout
    from f8sub.weights.weight import WeightRecord


class Region(Protocol):
    """A guest's float32 entries in an exchange's table, ``size`` of them; every rank has the same regions."""

    size: int

    @property
    def due(self) -> bool:
        """Whether it has something to reduce, as every rank knows."""

    def write(self, out: torch.Tensor) -> None:
        """Write what this rank knows, (size,). The table then takes the maximum over the ranks."""

    def read(self, reduced: torch.Tensor, weight_amax: torch.Tensor) -> torch.Tensor:
        """Take the maximum, (size,), before the scales of the weights are made: it may decide them.

        ``weight_amax`` are the reduced amaxes of all weights, infinity for one that is not finite. Returns float32, of
        one dimension and a constant length: not 0 where there is something to tell.
        """

    def tell(self, found: torch.Tensor) -> list[str]:
        """Errors of what ``read`` returned, once that came to the host; may warn instead."""


class Guest:
    """One that takes part in what the weights of a conversion do together; a subclass overrides what it needs."""

    def __init__(self, conversion: "Conversion") -> None:
        """Begin with a conversion that has no weights yet."""

    def described(self) -> dict[str, str]:
        """What every rank must have alike, besides the layers' own descriptions."""
        return {}

    def entered(
        self,
        members: "Sequence[tuple[WeightRecord, ShardLayout]]",
        dtypes: "ParamDtypes",
        exchange: "Exchange",
    ) -> None:
        """Weights are entered that some ranks shard alike, all of which are here; may raise an error on each."""

    def prior_of(self, record: "WeightRecord") -> Callable[[], PriorScale] | None:
        """What makes the weight's scales together with its amaxes, one a tile; None for the amaxes alone."""
        return None

    def region(self, records: "Sequence[WeightRecord]", before: Region | None) -> Region | None:
        """A region for the exchange of these sharded weights; ``before`` is its region while it had fewer of them."""
        return None

    def before_state_dict(self) -> None:
        """A state dict of a module is about to be taken or loaded."""

    def loaded(self) -> None:
        """A state dict was loaded into a module of the conversion."""

    def before_step(self, optimizer: torch.optim.Optimizer, weights: Sequence[torch.Tensor]) -> None:
        """An optimizer is about to step these parameters; may raise Float8ConfigError."""

    def stepped(self, weights: Sequence[torch.Tensor]) -> None:
        """An optimizer has just stepped these parameters; called once ``Conversion.counts_steps`` is True."""

    def stepped_elsewhere(self, weights: Sequence[torch.Tensor]) -> None:
        """Another rank stepped these weights, or is late; this one did not, and reduces all regions with it."""

    def before_last_launched(self) -> None:
        """``graph_step`` is about to launch the last step before it captures one."""

    def before_capture(self) -> None:
        """``graph_step`` is about to capture a step; may raise Float8NumericsError."""

    def precompute(self) -> None:
        """``precompute_scales`` begins; may raise Float8NumericsError."""

    def requested(self) -> None:
        """``precompute_scales`` began all reductions; may raise Float8NumericsError."""


class LayerGuest:
    """One that takes part in what happens to converted layers; a subclass overrides what it needs.

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
        """The layer's entries of a state dict were loaded."""

    def alike(self, layer: torch.nn.Module) -> dict[str, str]:
        """What every rank must have alike of a layer, by its name in the error."""
        return {}

    def deviation(self, layer: Any) -> str | None:
        """What ``repr`` and reports say of a layer that is not as usual."""
        return None
