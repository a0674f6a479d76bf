"""What features do for weights: Guest, one a conversion, and Region, a guest's part of an exchange's table."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

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
    """What a feature does for the weights of one conversion; a feature overrides what it needs."""

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

    def precompute(self) -> None:
        """``precompute_scales`` begins; may raise Float8NumericsError."""

    def requested(self) -> None:
        """``precompute_scales`` began all reductions; may raise Float8NumericsError."""


makers: "list[Callable[[Conversion], Guest]]" = []
"""What features have added: called once a conversion."""

side_by_side: Callable[[Sequence[PriorScale], int, int], PriorScale]
"""The prior scales of several weights as the table has them: each at a multiple of so many entries, so many in all."""
