"""The socket of an exchange: what features have reduced together with the weights' amaxes."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from f8sub.kernels.scales import PriorScale
from f8sub.weights.record import WeightRecord

if TYPE_CHECKING:
    from f8sub.weights.conversion import Conversion


class Region(Protocol):
    """A part of an exchange's table that belongs to a feature. Which there are is alike on every rank.

    Attributes:
        size: number of its float32 entries.
    """

    size: int

    @property
    def due(self) -> bool:
        """Whether it has something to reduce, as every rank knows."""

    def write(self, out: torch.Tensor) -> None:
        """Write what this rank knows.

        Args:
            out: float32, (size,); of what the ranks write the maximum is taken.
        """

    def read(self, reduced: torch.Tensor, weight_amax: torch.Tensor) -> torch.Tensor:
        """Take the maximum; before the scales of the weights are made, which it may decide.

        Args:
            reduced: float32, (size,).
            weight_amax: float32, the reduced amaxes of all weights; infinity for one that is not finite.

        Returns:
            float32, of one dimension, of a length that never changes: not 0 where there is something to tell.
        """

    def tell(self, found: torch.Tensor) -> list[str]:
        """Errors of what ``read`` returned, once that came to the host; may warn instead."""


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
