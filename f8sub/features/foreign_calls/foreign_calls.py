"""Calls written for torchao, TransformerEngine or torchtitan: errors that show the same call of f8sub."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from f8sub.convert import sockets
from f8sub.errors import Float8ConfigError, nearest, shown
from f8sub.recipe import Recipe, recipe_names

CALL = "f8sub.convert_to_float8(model, recipe='tensorwise', filter_fn=lambda module, fqn: ..., float8_all_gather=True)"

MEANT = {
    "config": "recipe",
    "fp8_recipe": "recipe",
    "fp8_format": 'recipe=f8sub.get_recipe("delayed", fp8_format=...)',
    "emulate": 'backend="reference"',
    "precompute_float8_dynamic_scale_for_fsdp": "f8sub.precompute_scales(model) after every optimizer.step()",
    "modules_to_ignore": "skip",
    "module_filter_func": "filter_fn",
    "ignored_layers": "skip",
}
"""Options of other libraries' calls, and what stands for each in f8sub's."""


def refuse_foreign(model: Any, recipe: Any, unknown: Mapping[str, Any], options: Iterable[str]) -> None:
    """Raise a ``Float8ConfigError`` that says what stands here for the arguments of another library's call.

    Args:
        model: what was given as one.
        recipe: what was given as one, torchao's filter function or config for instance.
        unknown: keywords that ``convert_to_float8`` does not have.
        options: those that it has.
    """
    for name, value in unknown.items():
        meant = MEANT.get(name) or next(iter(nearest(name, options)), None)
        advice = f"use {meant}; " if meant else ""
        raise Float8ConfigError(
            f"convert_to_float8 has no option {name!r}, got {name}={shown(value)}: {advice}f8sub's call is {CALL}"
        )
    if not isinstance(model, torch.nn.Module):
        raise Float8ConfigError(
            f"convert_to_float8 takes a model, a torch.nn.Module, got {shown(model)}: f8sub's call is {CALL}"
        )
    if recipe is None or isinstance(recipe, str | Recipe | Mapping):
        return
    if callable(recipe):
        raise Float8ConfigError(
            "the second argument of convert_to_float8 is the recipe, got a function; a filter is given by name: "
            f"{CALL}"
        )
    raise Float8ConfigError(
        f"recipe is one of {recipe_names()} or an f8sub.Recipe, got {shown(recipe)}: f8sub's call is {CALL}"
    )


sockets.check_call = refuse_foreign
