"""Sentences of a conversion report about experts: what they gain, before anything is trained."""

from collections.abc import Iterator
from typing import Any

import torch

from f8sub.convert.checks import is_converted
from f8sub.convert.filters import kind_of
from f8sub.convert.other_weights import ROOT
from f8sub.estimator.experts import ASSUMED, of_module
from f8sub.estimator.shapes import expert_products
from f8sub.experts.seams import AUTO_EXPERTS, seam_of
from f8sub.recipe import Recipe, get_recipe
from f8sub.recipes import DEFAULT

BY_WIDTH = (
    f' experts="auto" assumed {ASSUMED:,} tokens an expert; with tokens=, of one forward, it knows them.'
)


def told_of_experts(model: torch.nn.Module, tokens: int | None) -> Iterator[str]:
    """A sentence for each kind of experts in ``model``, those of equal names and sizes together.

    Args:
        model: converted or not. Experts that are not converted are told about with the recipe of the first module that
            is, or the default one.
        tokens: of one forward; None for those that ``convert_to_float8`` was given.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    first = next(filter(is_converted, modules.values()), None)
    other: Recipe = get_recipe(DEFAULT) if first is None else first.plan.recipe
    options = {} if first is None else first.converted.options
    by_width = options.get("experts") == AUTO_EXPERTS and options["tokens"] is None
    tokens = tokens or options.get("tokens")
    seen = set()
    for fqn, module in modules.items():
        if seam_of(module) is None or not (products := expert_products(model, fqn, None)):
            continue
        recipe = module.plan.recipe if is_converted(module) else other
        sizes = tuple((product.experts, product.rows, product.cols) for product in products)
        if (key := (kind_of(fqn), sizes, recipe.name)) in seen:
            continue
        seen.add(key)
        shown = ", ".join(f"{rows} x {cols}" for _, rows, cols in sizes)
        gain = of_module(modules, fqn, recipe, tokens)
        yield f"{kind_of(fqn) or ROOT}, {sizes[0][0]} experts of {shown}: {gain}.{BY_WIDTH if by_width else ''}"
