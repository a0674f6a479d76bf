"""Layer 6. Which layers are converted, and with which recipe: one reason for every layer that is not."""

import fnmatch
from collections.abc import Callable, Mapping, Sequence

import torch

from f8sub.errors import Float8ConfigError
from f8sub.extensions import extensions
from f8sub.formats import HIGH_PRECISION
from f8sub.linear import Float8Linear
from f8sub.recipe import Recipe, get_recipe

FilterFn = Callable[[torch.nn.Module, str], bool]

RecipeOrName = Recipe | str

MULTIPLE = 16
"""Both dimensions of a float8 GEMM operand. Source: cuBLASLt, ATen/native/cuda/ScaledBlas.cpp."""

DEFAULT_SKIP = ("lm_head",)
"""The output projection stays in high precision: its gradient and logits decide the loss most directly."""


class LayerRecipes:
    """The recipe of each layer: one for all, or that of the first glob pattern that matches its name.

    Args:
        recipe: a recipe, its name, or a mapping from patterns (see ``matches``) to either.

    Raises:
        Float8ConfigError: an unknown recipe, or a key that is no pattern.
    """

    def __init__(self, recipe: RecipeOrName | Mapping[str, RecipeOrName]) -> None:
        self._by_layer = isinstance(recipe, Mapping)
        given = recipe if isinstance(recipe, Mapping) else {"*": recipe}
        if unknown := [pattern for pattern in given if not isinstance(pattern, str)]:
            raise Float8ConfigError(
                f"recipes for layers go by glob patterns over their names, got {unknown[0]!r}; give its name, as "
                "model.named_modules() has it"
            )
        self._recipes = {pattern: get_recipe(chosen) for pattern, chosen in given.items()}

    def pattern_of(self, fqn: str) -> str | None:
        """The pattern that decides for a layer; None where none matches."""
        return next((pattern for pattern in self._recipes if matches(pattern, fqn)), None)

    def of(self, fqn: str) -> Recipe | None:
        """A layer's recipe; None where no pattern matches, and the layer stays in high precision."""
        pattern = self.pattern_of(fqn)
        return None if pattern is None else self._recipes[pattern]

    def idle_patterns(self, converted: Sequence[str], others: Mapping[str, str]) -> tuple[str, ...]:
        """Patterns that decide for no converted layer, each with the reason.

        Args:
            converted: names of the converted layers.
            others: names of all other linear layers, and why they are not converted.
        """
        if not self._by_layer:
            return ()
        busy = {self.pattern_of(fqn) for fqn in converted}
        return tuple(
            f"{pattern!r} {self._why_idle(pattern, converted, others)}"
            for pattern in self._recipes
            if pattern not in busy
        )

    def _why_idle(self, pattern: str, converted: Sequence[str], others: Mapping[str, str]) -> str:
        if taken := next((fqn for fqn in converted if matches(pattern, fqn)), None):
            return f"matches only layers that an earlier pattern matches too ({self.pattern_of(taken)!r} {taken})"
        if left := next((fqn for fqn in others if matches(pattern, fqn)), None):
            return f"matches no layer that is converted ({left}: {others[left]})"
        return "matches no linear layer"


def why_not(
    module: torch.nn.Linear,
    fqn: str,
    *,
    filter_fn: FilterFn | None,
    skip: Sequence[str],
    recipes: LayerRecipes,
) -> str | None:
    """Why a linear layer stays as it is; None when it is converted.

    Args:
        module: an ``nn.Linear``, or of a subclass of it.
        fqn: its name in the model.
        filter_fn: the caller's predicate, True to convert.
        skip: glob patterns; one that matches a run of whole segments of ``fqn`` skips the layer.
        recipes: which recipe the layer would get.
    """
    if isinstance(module, Float8Linear):
        return "already converted"
    if type(module) is not torch.nn.Linear and type(module) not in extensions:
        return f"a subclass of nn.Linear ({type(module).__name__}) whose forward is its own"
    if pattern := next((p for p in skip if matches(p, fqn)), None):
        return f"skip={pattern!r}"
    if filter_fn is not None and not filter_fn(module, fqn):
        return "filter_fn said no"
    if recipes.of(fqn) is None:
        return "no pattern of recipe matches it"
    sizes = module.in_features, module.out_features
    if any(size % MULTIPLE or not size for size in sizes):
        return f"in_features={sizes[0]}, out_features={sizes[1]}: both have to be multiples of {MULTIPLE}"
    if module.weight.dtype not in HIGH_PRECISION:
        return f"its weight is {module.weight.dtype}"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "its weight is parametrized"
    return None


def matches(pattern: str, fqn: str) -> bool:
    """Whether a glob pattern matches ``fqn`` as a run of whole segments.

    ``"lm_head"`` matches ``model.lm_head`` and ``lm_head.proj``, never ``lm_head2``; ``"layers.0"`` matches
    ``model.layers.0.mlp.up`` and not ``model.layers.01``.
    """
    segments, parts = fqn.split("."), pattern.split(".")
    return any(
        all(fnmatch.fnmatchcase(s, p) for s, p in zip(segments[i : i + len(parts)], parts, strict=True))
        for i in range(len(segments) - len(parts) + 1)
    )
