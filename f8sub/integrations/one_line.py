"""What the integrations of trainers share: a model is converted unless it was before, and one line reports it."""

from collections.abc import Mapping
from typing import Any

import torch

import f8sub
from f8sub.convert.checks import is_converted


def convert_once(model: torch.nn.Module, recipe: Any, options: Mapping[str, Any]) -> str:
    """Convert a model, in place, and return one line on what is in float8.

    Args:
        model: not sharded yet. One that was converted before stays as it is where neither recipe nor options are given.
        recipe: as ``convert_to_float8`` takes it; None for its default.
        options: other keywords of ``convert_to_float8``.

    Raises:
        Float8ConfigError: what ``convert_to_float8`` raises.
    """
    # A recipe or an option that is given goes to ``convert_to_float8``, which refuses to change a converted layer.
    if recipe is not None or options or not any(map(is_converted, model.modules())):
        f8sub.convert_to_float8(model, recipe, **options)
    return f"f8sub: {f8sub.conversion_report(model).summary}"
