"""What features put into a layer's forward. Each is None where its feature is not there."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from f8sub.errors import Float8ConfigError
from f8sub.kernels.gemm.select import Plan
from f8sub.kernels.scales import CURRENT_SOURCES, Sources
from f8sub.recipe import Recipe

if TYPE_CHECKING:
    from f8sub.linear.float8_linear import Float8Linear


class LayerScaling(Protocol):
    """Where the scales of a layer come from under a recipe that does not take them of the current amax."""

    def enter(self, layer: "Float8Linear", recipe: Recipe) -> None:
        """A layer was converted with such a recipe."""

    def leave(self, layer: "Float8Linear") -> None:
        """A layer is an ``nn.Linear`` again."""

    def sources(self, layer: "Float8Linear", recipe: Recipe) -> Sources:
        """The sources of a forward that begins now."""

    def loaded(self, layer: "Float8Linear", state_dict: dict[str, Any], prefix: str) -> None:
        """The layer's entries of a state dict were loaded."""


class Placed(Protocol):
    """A forward of a layer whose weight is a DTensor: local matrices, and what their ranks do together."""

    @property
    def adds_bias(self) -> bool:
        """Whether this rank adds the bias."""

    def sources(
        self, layer: "Float8Linear", plan: Plan, weight: DTensor, x: torch.Tensor, sources: Sources
    ) -> Sources:
        """``sources`` with amaxes that are reduced over the ranks that a tile reaches over."""

    def local(
        self, x: torch.Tensor, weight: DTensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """This rank's part of each."""

    def whole(self, y: torch.Tensor) -> torch.Tensor:
        """The DTensor that the local ``y`` is a part of."""


class Placement(Protocol):
    """What runs layers whose weights are DTensors."""

    def of(self, layer: "Float8Linear", weight: DTensor, x: torch.Tensor) -> Placed:
        """The forward of a layer with an input."""


class Contexts:
    """Plans of forwards that are not their layer's own.

    Attributes:
        entered: whether any was ever asked for: until then this is all that a layer reads.
        plan_of: the plan of a layer's forward that begins now.
        remember: takes the layer, its plan and its ``y`` after a forward.
    """

    __slots__ = ("entered", "plan_of", "remember")

    plan_of: Callable[["Float8Linear"], Plan]
    remember: Callable[["Float8Linear", Plan, torch.Tensor], None]

    def __init__(self) -> None:
        self.entered = False


scaling: LayerScaling | None = None
placement: Placement | None = None
contexts = Contexts()


def sources_of(layer: "Float8Linear", recipe: Recipe) -> Sources:
    """The sources of a layer's forward that begins now."""
    # Of a layer's own forward asked there, too: every function that dynamo traces is one more guard.
    return scaling_of(recipe).sources(layer, recipe) if recipe.keeps_amaxes else CURRENT_SOURCES


def placed(layer: "Float8Linear", weight: DTensor, x: torch.Tensor) -> Placed:
    """The forward of a layer whose weight is a DTensor.

    Raises:
        Float8ConfigError: the weight's and the input's placements do not go together.
    """
    if placement is None:
        raise Float8ConfigError(
            f"{layer.fqn}: its weight is a DTensor, and f8sub.features.tensor_parallel is not there"
        )
    return placement.of(layer, weight, x)


def scaling_of(recipe: Recipe) -> LayerScaling:
    """The feature that a recipe needs whose scales are not of the current amax."""
    if scaling is None:
        raise RuntimeError(f"recipe {recipe.name!r} needs f8sub.features.delayed, which is not there")
    return scaling
