"""Refuses what cannot be converted before a model changes: each error names the layer and what to do."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from f8sub.convert.patterns import LayerChoices
from f8sub.errors import Float8ConfigError, Float8Warning
from f8sub.kernels.gemm.select import Plan
from f8sub.linear.float8_linear import Float8Linear
from f8sub.recipe import Recipe
from f8sub.torch_compat import is_dtensor, is_fsdp1_module, is_fsdp_module
from f8sub.weights.weight import is_converted


class Chosen(NamedTuple):
    """A layer that is to be converted; ``gathered``: whether FSDP2 gathers its weight as float8."""

    module: torch.nn.Linear
    fqn: str
    plan: Plan
    gathered: bool
    keep_x: str


def refusal_of(function: Callable[..., Any], *args: Any) -> str | None:
    """Return the message of the Float8ConfigError that a call raises; None where it raises none."""
    try:
        function(*args)
    except Float8ConfigError as error:
        return str(error)
    return None


CONVERT_FIRST = "call convert_to_float8 before fully_shard and parallelize_module, on the whole model"


def refuse_sharded(model: torch.nn.Module, todo: str = CONVERT_FIRST) -> None:
    """Refuse a sharded weight: its parts cannot become one master weight, nor a plain one. ``todo`` is the advice."""
    for fqn, module in model.named_modules():
        if (
            is_fsdp_module(module)
            or is_fsdp1_module(module)
            or any(map(is_dtensor, module.parameters(recurse=False)))
        ):
            raise Float8ConfigError(
                f"{fqn or 'the model'} is already sharded ({type(module).__name__}): {todo}"
            )


def refuse_other_recipe(model: torch.nn.Module, recipes: LayerChoices[Recipe | None]) -> None:
    """Refuse another recipe for a layer: it keeps the one that it was converted with."""
    module: Any
    for fqn, module in model.named_modules():
        if not is_converted(module) or (recipe := recipes.of(fqn)) is None:
            continue
        if (state := module._f8sub).plan.recipe != recipe:
            raise Float8ConfigError(
                f"{state.fqn} is already converted with recipe {state.plan.recipe.name!r}, asked for "
                f"{recipe.name!r}: call convert_from_float8(model) first"
            )


def refuse_tied_apart(model: torch.nn.Module, chosen: Sequence[Chosen]) -> None:
    """Refuse recipes that read a tied weight differently: it is cast and gathered once, for all of its layers."""
    recipes: dict[torch.nn.Module, Recipe] = {layer.module: layer.plan.recipe for layer in chosen}
    readers: dict[int, tuple[str, Recipe]] = {}
    for fqn, module in model.named_modules():
        recipe = module._f8sub.plan.recipe if isinstance(module, Float8Linear) else recipes.get(module)
        if recipe is None:
            continue
        # The first layer with this weight decides; each later one is compared with it.
        other_fqn, other = readers.setdefault(id(module.weight), (fqn, recipe))
        if (recipe.formats("w"), recipe.scaling) != (other.formats("w"), other.scaling):
            raise Float8ConfigError(
                f"{fqn} and {other_fqn} share one weight, which is cast and gathered once, but their recipes "
                f"{recipe.name!r} and {other.name!r} read it differently: give both the same recipe"
            )


def quantizers_steps(rule: Any) -> list[str]:
    """Return the steps of a quantizer in a rule by which transformers loaded weights, by their classes' names.

    A model keeps its rules and reverts them when it is saved. Source: ``transformers.integrations`` defines all steps
    of quantizers, and no others.
    """
    steps = [type(step) for step in getattr(rule, "operations", None) or ()]
    return [step.__name__ for step in steps if step.__module__.startswith("transformers.integrations.")]


def warn_of_quantized_origin(model: torch.nn.Module) -> None:
    """Warn where transformers dequantized a model when it loaded it, and would quantize it again when it saves it.

    It writes float8 then and no ``quantization_config``, so a reader takes the data as values. Source: transformers up
    to 5.23; later ones drop the rules of a model that they dequantize.
    """
    for module in model.modules():
        steps = [
            step for rule in vars(module).get("_weight_conversions") or () for step in quantizers_steps(rule)
        ]
        if steps and getattr(getattr(module, "config", None), "quantization_config", None) is None:
            warnings.warn(
                f"{type(module).__name__} came from a quantized checkpoint ({steps[0]}), and its save_pretrained "
                "fails, or quantizes again without saying so in config.json, and readers take codes as values; save it "
                "with save_pretrained(folder, save_original_format=False) or with f8sub.save_float8",
                Float8Warning,
                stacklevel=4,
            )
            return
