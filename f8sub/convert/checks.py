"""What a conversion refuses before it changes a model: each error names the layer and what to do."""

import warnings

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from f8sub.convert.filters import LayerKeepX, LayerRecipes
from f8sub.errors import Float8ConfigError, Float8Warning
from f8sub.kernels.gemm.select import Plan
from f8sub.linear.float8_linear import Float8Linear
from f8sub.linear.saved_input import RECOMPUTE, reencodes, why_not_kept
from f8sub.recipe import Recipe
from f8sub.recipes import DEFAULT


def refuse_sharded(model: torch.nn.Module) -> None:
    """A sharded weight's parts cannot become one master weight."""
    for fqn, module in model.named_modules():
        if isinstance(module, FSDPModule) or any(
            isinstance(p, DTensor) for p in module.parameters(recurse=False)
        ):
            raise Float8ConfigError(
                f"{fqn or 'the model'} is already sharded ({type(module).__name__}): call convert_to_float8 before "
                "fully_shard and parallelize_module, on the whole model; to go back to plain layers, load the "
                "state dict into an unconverted model"
            )


def refuse_other_recipe(model: torch.nn.Module, recipes: LayerRecipes) -> None:
    """A layer keeps the recipe that it was converted with."""
    for fqn, module in model.named_modules():
        recipe = recipes.of(fqn) if isinstance(module, Float8Linear) else None
        if isinstance(module, Float8Linear) and recipe is not None and module.plan.recipe != recipe:
            raise Float8ConfigError(
                f"{module.fqn} is already converted with recipe {module.plan.recipe.name!r}, asked for "
                f"{recipe.name!r}: call convert_from_float8(model) first"
            )


def refuse_tied_apart(
    model: torch.nn.Module, names: dict[torch.nn.Linear, str], plans: dict[torch.nn.Linear, Plan]
) -> None:
    """A weight is cast and gathered once, so all of its layers read the same codes."""
    readers: dict[int, tuple[str, Recipe]] = {}
    for fqn, module in model.named_modules():
        if isinstance(module, Float8Linear):
            recipe = module.plan.recipe
        elif module in names:
            recipe = plans[module].recipe
        else:
            continue
        other_fqn, other = readers.setdefault(id(module.weight), (fqn, recipe))
        if (recipe.formats("w"), recipe.delayed) != (other.formats("w"), other.delayed):
            raise Float8ConfigError(
                f"{fqn} and {other_fqn} share one weight, which is cast and gathered once, but their recipes "
                f"{recipe.name!r} and {other.name!r} read it differently: give both the same recipe"
            )


def refuse_high_precision(
    plans: dict[torch.nn.Linear, Plan], names: dict[torch.nn.Linear, str], float8: dict[torch.nn.Linear, bool]
) -> None:
    """Primary weights are codes and nothing else, so none of their layers may read them in high precision."""
    for module, plan in plans.items():
        if not float8[module]:
            raise Float8ConfigError(
                f"primary_weights=True keeps nothing but float8 codes of a weight, and {names[module]} with recipe "
                f"{plan.recipe.name!r} reads it in high precision, or float8_all_gather=False gathers it so; choose "
                "one of the two"
            )


def refuse_delayed(plans: dict[torch.nn.Linear, Plan], names: dict[torch.nn.Linear, str]) -> None:
    """A primary weight is cast when its optimizer steps, by what it is then."""
    for module, plan in plans.items():
        if plan.recipe.keeps_amaxes:
            raise Float8ConfigError(
                f"primary_weights=True scales weights by their current amax, and {names[module]} with recipe "
                f"{plan.recipe.name!r} scales them by their past; choose one of the two, {DEFAULT!r} for instance"
            )


def check_keep_x(
    plans: dict[torch.nn.Linear, Plan], names: dict[torch.nn.Linear, str], kept: LayerKeepX
) -> None:
    """Refuse what a recipe cannot keep x as; warn where its codes are re-encoded."""
    rounded = []
    for module, plan in plans.items():
        fqn, recipe = names[module], plan.recipe
        keep_x = kept.of(fqn)
        if reason := why_not_kept(recipe, keep_x):
            raise Float8ConfigError(
                f"{fqn} with recipe {recipe.name!r} cannot take keep_x={keep_x!r}: {reason}. Give it 'auto'"
            )
        if keep_x == RECOMPUTE and reencodes(recipe):
            rounded.append(f"{fqn} ({recipe.name})")
    if rounded:
        warnings.warn(
            f"keep_x='recompute' re-scales the codes of x by columns in {len(rounded)} layers, {rounded[0]} first: "
            "what falls below a column's smallest code is rounded again or lost; keep_x='high_precision' or 'auto' "
            "keeps the numbers",
            Float8Warning,
            stacklevel=3,
        )
