"""What the integrations of trainers share: a model is converted unless it was before, and one line reports it."""

from collections.abc import Mapping
from typing import Any

import torch

import f8sub
from f8sub.weights.weight import is_converted


def convert_once(model: torch.nn.Module, recipe: Any, options: Mapping[str, Any]) -> str:
    """Convert a model, in place, and return one line on what is in float8.

    Args:
        model: not sharded yet, or converted before: then it stays as it is, sharded or not.
        recipe: as ``convert_to_float8`` takes it; None for its default, or for the one that the model has.
        options: other keywords of ``convert_to_float8``.

    Raises:
        Float8ConfigError: the model was converted with another recipe, or what ``convert_to_float8`` raises.
    """
    layers: list[Any] = [module for module in model.modules() if is_converted(module)]
    used = {layer._f8sub.plan.recipe for layer in layers}
    if not used:
        f8sub.convert_to_float8(model, recipe, **options)
    elif recipe is not None:
        asked = [
            f8sub.get_recipe(each) for each in (recipe.values() if isinstance(recipe, Mapping) else [recipe])
        ]
        if other := sorted(each.name for each in used.difference(asked)):
            raise f8sub.Float8ConfigError(
                f"the model is already converted with recipe {', '.join(other)}, asked for "
                f"{', '.join(each.name for each in asked)}: leave one of the two conversions out"
            )
    return f"f8sub: {f8sub.conversion_report(model).summary}"
