"""The plan of a forward that begins now, and where its scales come from."""

from typing import Any

import torch

from f8sub.delayed import layers
from f8sub.kernels.scales import CURRENT_SOURCES, Sources
from f8sub.linear import plan_in_use
from f8sub.recipe import Recipe


def plan_of(layer: Any, weight: torch.Tensor) -> Any:
    """The plan of a forward of a converted module that begins now, for its product with ``weight``."""
    return plan_in_use.plan_in_use(layer, weight) if plan_in_use.was_entered else layer.plan


def sources_of(layer: torch.nn.Module, recipe: Recipe, name: str = "weight") -> Sources:
    """The sources of a forward that begins now, of the product with the weight of that name."""
    return CURRENT_SOURCES if recipe.scaling is None else layers.sources_of(layer, recipe, name)
