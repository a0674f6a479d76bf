"""Names and calls of torchao, TransformerEngine or torchtitan: errors that show those of f8sub."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

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


NAMES = {
    "convert_to_float8_training": "f8sub.convert_to_float8(model)",
    "Float8LinearConfig": "f8sub.convert_to_float8(model, recipe=...)",
    "precompute_float8_dynamic_scale_for_fsdp": "f8sub.precompute_scales(model)",
    "WeightWithDynamicFloat8CastTensor": "a parameter of f8sub.Float8Linear, saved as a plain tensor",
    "CastConfig": "a format of f8sub.Recipe, or Recipe.with_high_precision(...)",
    "Float8GemmConfig": "f8sub.GemmSpec(fast_accum=...)",
    "Float8ColwiseParallel": "f8sub.tensor_parallel.Float8ColwiseParallel",
    "Float8RowwiseParallel": "f8sub.tensor_parallel.Float8RowwiseParallel",
    "PrepareFloat8ModuleInput": "f8sub.tensor_parallel.PrepareFloat8ModuleInput",
    "Linear": "an nn.Linear that f8sub.convert_to_float8(model) converts",
    "LayerNormLinear": "a norm and an nn.Linear under torch.compile",
    "LayerNormMLP": "a norm and nn.Linear layers under torch.compile",
    "GroupedLinear": "f8sub.grouped_linear",
    "fp8_autocast": "f8sub.autocast(recipe=, enabled=), and nothing around the usual forward",
    "Float8CurrentScaling": 'the recipe "tensorwise"',
    "Float8BlockScaling": 'the recipe "blockwise"',
    "MXFP8BlockScaling": 'the recipe "mxfp8"',
    "NVFP4BlockScaling": 'the recipe f8sub.get_recipe("nvfp4", stochastic_rounding=True, hadamard=True)',
    "DelayedScaling": 'the recipe f8sub.get_recipe("delayed", ...)',
    "CustomRecipe": "f8sub.Recipe",
    "quantized_model_init": "f8sub.convert_to_float8(model, primary_weights=True)",
    "fp8_model_init": "f8sub.convert_to_float8(model, primary_weights=True)",
    "FusedAdam": "f8sub.optim.MasterWeights(torch.optim.AdamW(...))",
    "Float8Converter": "f8sub.titan.Float8Converter",
    "titan": "a module that is imported by itself: import f8sub.titan",
}
"""Names of other libraries' modules, as docs/migration.md has them, and what stands for each in f8sub."""


def no_attribute(name: str, known: Iterable[str]) -> AttributeError:
    """The error of an attribute that f8sub has not, with what stands for another library's name, or the nearest names.

    Args:
        name: that was asked for.
        known: f8sub's own.
    """
    near = ", ".join(nearest(name, known))
    meant = NAMES.get(name)
    told = f"; there is {meant}" if meant else f" (nearest: {near})" if near else ""
    return AttributeError(f"module 'f8sub' has no attribute {name!r}{told}", name=name)


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
