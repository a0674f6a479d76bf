"""What features put into a layer: scales, forwards of DTensors, plans for a while, and what each says of the layer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from f8sub.kernels.gemm.select import gemm_nt
from f8sub.kernels.reference import Quantized
from f8sub.kernels.scales import Sources
from f8sub.recipe import Recipe


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
