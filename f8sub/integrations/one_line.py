"""What the integrations of trainers share: a model is converted unless it was before, and one line reports it."""

from collections.abc import Mapping
from typing import Any

import torch

import f8sub
from f8sub.convert.attention import attention_modules
from f8sub.weights.weight import is_converted

HIGH_PRECISION = "high_precision"
ATTENTION = {HIGH_PRECISION: None, "float8": "float8", "float8_forward": "bf16"}
"""What a trainer's option ``attention`` may be, and ``backward`` of ``attend_in_float8`` for it."""


def convert_once(
    model: torch.nn.Module, recipe: Any, options: Mapping[str, Any], attention: str = HIGH_PRECISION
) -> str:
    """Convert a model, in place, and return one line on what is in float8.

    Args:
        model: not sharded yet, or converted before: then its layers stay as they are, sharded or not.
        recipe: as ``convert_to_float8`` takes it; None for its default, or for the one that the model has.
        options: other keywords of ``convert_to_float8``.
        attention: one of ``ATTENTION``, see ``attend_once``.

    Raises:
        Float8ConfigError: the model was converted with another recipe, or what ``convert_to_float8`` and
            ``attend_once`` raise.
    """
    refuse_unknown_attention(attention)
    if attention != HIGH_PRECISION and not has_attention(model):
        # Before anything changes, with what that says.
        f8sub.attend_in_float8(model)
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
    attend_once(model, attention, emulated=options.get("backend") == "reference")
    return f"f8sub: {f8sub.conversion_report(model).summary}"


def refuse_unknown_attention(attention: str) -> None:
    """Raise a Float8ConfigError for an ``attention`` that is none of ``ATTENTION``."""
    if attention not in ATTENTION:
        raise f8sub.Float8ConfigError(
            f"unknown attention {attention!r}; choose one of {', '.join(ATTENTION)}"
        )


def has_attention(model: torch.nn.Module) -> bool:
    """Return whether a module of the model calls ``scaled_dot_product_attention``."""
    return len(attention_modules(model)) > 0


def attend_once(model: torch.nn.Module, attention: str, *, emulated: bool) -> None:
    """Have a model attend in float8, in place, unless it does already.

    Args:
        model: not sharded yet, or one that attends in float8: then it stays as it is.
        attention: one of ``ATTENTION``.
        emulated: as float8's layers are, to try it out on any device: by the reference, for sequences of any length.

    Raises:
        Float8ConfigError: the model attends in float8 in another way, or what ``attend_in_float8`` raises.
    """
    if (backward := ATTENTION[attention]) is None:
        return
    states = [each.state for each in attention_modules(model) if each.state is not None]
    if any(state.has_past != (backward == "float8") for state in states):
        raise f8sub.Float8ConfigError(
            f"the model already attends in float8 with backward in {states[0].backward}, asked for "
            f"attention={attention!r}: leave one of the two out"
        )
    if states:
        return
    if emulated:
        f8sub.attend_in_float8(model, backward=backward, min_length=0, backend="reference")
    else:
        f8sub.attend_in_float8(model, backward=backward)
