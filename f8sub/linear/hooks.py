"""What features put into a layer: scales, forwards of DTensors, plans for a while, and what each says of the layer."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from f8sub.kernels.gemm.select import Plan, gemm_nt
from f8sub.kernels.reference import Quantized
from f8sub.kernels.scales import Sources
from f8sub.recipe import Recipe
from f8sub.weights.conversion import Conversion


class LayerGuest:
    """What a feature does for layers; a feature overrides what it needs.

    A layer is a ``Float8Linear``, or of another kind that a feature converts.
    """

    def planned(self, conversion: Conversion, plans: Sequence[Plan]) -> None:
        """Layers of a conversion are to run, or came to a device where they run, by these plans; may warn."""

    def entered(self, layer: torch.nn.Module) -> None:
        """A layer was converted."""

    def left(self, layer: torch.nn.Module) -> None:
        """A layer is what it was again."""

    def converted(self, model: torch.nn.Module, conversion: Conversion) -> None:
        """The layers of a model were converted."""

    def loaded(self, layer: torch.nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """The layer's entries of a state dict were loaded."""

    def alike(self, layer: torch.nn.Module) -> dict[str, str]:
        """What every rank must have alike of a layer, by its name in the error."""
        return {}

    def deviation(self, layer: torch.nn.Module) -> str | None:
        """What ``repr`` and reports say of a layer that is not as usual."""
        return None


class Placed(NamedTuple):
    """This rank's part of a forward whose weight is a DTensor.

    Attributes:
        x: the local matrix; ``weight`` and ``bias`` likewise.
        adds_bias: whether this rank adds the bias.
        sources: those of the call, with amaxes that are reduced over the ranks that a tile reaches over.
        whole: makes the DTensor that a local ``y`` is a part of.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    adds_bias: bool
    sources: Sources
    whole: Callable[[torch.Tensor], torch.Tensor]


guests: list[LayerGuest] = []
forward_hooks: list[Callable[..., Any]] = []
"""Hooks that features put on modules, which ``convert_from_float8`` takes off."""
scaling: Callable[..., Sources]
"""The sources of a forward that begins now: of a layer, a recipe whose ``scaling`` is not None, and a weight's name."""
placement: Callable[..., Placed]
"""Places a forward whose weight is a DTensor: layer, plan, weight, x, bias, and the sources of its operands."""
one_node: Callable[..., torch.Tensor]
"""``placement`` and the GEMMs while ``torch.compile`` traces, of a weight or x that is a DTensor of float8."""
context_plan: Callable[[Any, torch.Tensor], Any] | None = None
"""The plan of a forward that begins now where contexts ask for it, of a layer and its weight; None while no context
was ever entered."""
remember: Callable[[Any, Any, torch.Tensor], None]
"""Takes the layer, its plan and its ``y`` after a product, once ``context_plan`` is there."""
how_kept: Callable[[torch.Tensor, Recipe], str]
"""What ``keep_x="auto"`` is for an x and a recipe, see ``saved_input.KEEP_X``."""
multiply: Callable[..., torch.Tensor] = gemm_nt
"""Multiplies two operands, with arguments as those of ``gemm_nt``; a feature may show it to who looks on."""
cast: Callable[..., Quantized]
"""Casts an x in eager code, see ``saved_input.cast_anew``; a feature may know the codes already."""
