"""What a conversion refuses before it changes a model: each error names the layer and what to do."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from f8sub.convert.filters import LayerChoices
from f8sub.convert.patterns import kind_of, name_of
from f8sub.errors import Float8ConfigError, Float8Warning
from f8sub.kernels.gemm.select import Plan
from f8sub.linear.float8_linear import Float8Linear
from f8sub.linear.saved_input import RECOMPUTE, reencodes, why_not_kept
from f8sub.recipe import Recipe
from f8sub.weights.conversion import Conversion

SKIP_REASON = "float8_skip_reason"
"""Attribute that ``convert_to_float8`` leaves on a linear layer it did not convert."""

ADVICE = {
    "loosen skip, filter_fqns or filter_fn": ("skip=", "filter_fqns=", "filter_fn"),
    "give recipe a pattern that matches": ("no pattern of recipe",),
    "pass skip_defaults=False": ("(default)",),
    "pass a smaller min_dim": ("min_dim=",),
}
"""What to do where no layer was converted, by words of the reasons."""


class Chosen(NamedTuple):
    """A layer that is to be converted; ``gathered``: whether FSDP2 gathers its weight as float8."""

    module: torch.nn.Linear
    fqn: str
    plan: Plan
    gathered: bool
    keep_x: str


of_options: dict[str, Callable[[Sequence[Chosen]], None]] = {}
"""What features refuse where their option of ``convert_to_float8`` is given, by the option's name."""

classes_of_others: Callable[[torch.nn.Module], Sequence[str]] | None = None
"""Where a feature says which classes of a model multiply by weights and are no nn.Linear."""


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


def is_converted(module: Any) -> bool:
    """Whether a module has weights that were converted."""
    conversion = vars(module).get("converted")
    return isinstance(conversion, Conversion) and conversion.owns(module)


def refuse_other_recipe(model: torch.nn.Module, recipes: LayerChoices[Recipe | None]) -> None:
    """A layer keeps the recipe that it was converted with."""
    module: Any
    for fqn, module in model.named_modules():
        if not is_converted(module) or (recipe := recipes.of(fqn)) is None:
            continue
        if module.plan.recipe != recipe:
            raise Float8ConfigError(
                f"{module.fqn} is already converted with recipe {module.plan.recipe.name!r}, asked for "
                f"{recipe.name!r}: call convert_from_float8(model) first"
            )


def refuse_tied_apart(model: torch.nn.Module, chosen: Sequence[Chosen]) -> None:
    """A weight is cast and gathered once, so all of its layers read the same codes."""
    recipes: dict[torch.nn.Module, Recipe] = {layer.module: layer.plan.recipe for layer in chosen}
    readers: dict[int, tuple[str, Recipe]] = {}
    for fqn, module in model.named_modules():
        recipe = module.plan.recipe if isinstance(module, Float8Linear) else recipes.get(module)
        if recipe is None:
            continue
        other_fqn, other = readers.setdefault(id(module.weight), (fqn, recipe))
        if (recipe.formats("w"), recipe.scaling) != (other.formats("w"), other.scaling):
            raise Float8ConfigError(
                f"{fqn} and {other_fqn} share one weight, which is cast and gathered once, but their recipes "
                f"{recipe.name!r} and {other.name!r} read it differently: give both the same recipe"
            )


def check_keep_x(chosen: Sequence[Chosen]) -> None:
    """Refuse what a recipe cannot keep x as; warn where its codes are re-encoded."""
    rounded = []
    for _, fqn, plan, _, keep_x in chosen:
        if reason := why_not_kept(plan.recipe, keep_x):
            raise Float8ConfigError(
                f"{fqn} with recipe {plan.recipe.name!r} cannot take keep_x={keep_x!r}: {reason}. Give it 'auto'"
            )
        if keep_x == RECOMPUTE and reencodes(plan.recipe):
            rounded.append(f"{fqn} ({plan.recipe.name})")
    if rounded:
        warnings.warn(
            f"keep_x='recompute' re-scales the codes of x by columns in {len(rounded)} layers, {rounded[0]} first: "
            "what falls below a column's smallest code is rounded again or lost; keep_x='high_precision' or 'auto' "
            "keeps the numbers",
            Float8Warning,
            stacklevel=4,
        )


def why_nothing(model: torch.nn.Module) -> str:
    """Why no layer of a model was converted, and what to do."""
    classes = dict.fromkeys(() if classes_of_others is None else classes_of_others(model))
    others = f"; nor does f8sub convert its {', '.join(classes)}" if classes else ""
    reasons: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    count = 0
    for fqn, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            count += 1
            reasons[getattr(module, SKIP_REASON)][kind_of(fqn or "(root)")].append(fqn or "(root)")
    if not count:
        return f"the model has no nn.Linear layer{others}. Pass strict=False if that is as it should be"
    listed = "; ".join(
        f"{', '.join(map(name_of, kinds.values()))}: {reason}" for reason, kinds in reasons.items()
    )
    advice = [
        what for what, words in ADVICE.items() if any(word in reason for reason in reasons for word in words)
    ]
    do = ", ".join([*advice, "or pass strict=False"]).removeprefix("or ")
    return f"0 of {count} linear layers ({listed}){others}. {do[0].upper()}{do[1:]}"
