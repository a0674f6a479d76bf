"""The plan of a forward that begins now, and where its scales come from."""

from typing import Any

import torch

from f8sub.kernels.scales import CURRENT_SOURCES, Sources
from f8sub.linear import hooks as sockets
from f8sub.recipe import Recipe


def plan_of(layer: Any, weight: torch.Tensor) -> Any:
    """The plan of a forward of a converted module that begins now, for its product with ``weight``."""
    return layer.plan if sockets.context_plan is None else sockets.context_plan(layer, weight)


def sources_of(layer: torch.nn.Module, recipe: Recipe, name: str = "weight") -> Sources:
    """The sources of a forward that begins now, of the product with the weight of that name."""
    return CURRENT_SOURCES if recipe.scaling is None else sockets.scaling(layer, recipe, name)
