"""Layer 6. Which layers are converted, and with which recipe: one reason for every layer that is not."""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from f8sub.errors import Float8ConfigError
from f8sub.extensions import extensions
from f8sub.formats import HIGH_PRECISION
from f8sub.linear import Float8Linear
from f8sub.recipe import Recipe, get_recipe
from f8sub.saved_input import AUTO, KEEP_X

FilterFn = Callable[[torch.nn.Module, str], bool]

RecipeOrName = Recipe | str

MULTIPLE = 16
"""Both dimensions of a float8 GEMM operand. Source: cuBLASLt, ATen/native/cuda/ScaledBlas.cpp."""

DEFAULT_SKIP = ("lm_head",)
"""The output projection stays in high precision: its gradient and logits decide the loss most directly."""


Choice = TypeVar("Choice")


class LayerChoices(Generic[Choice]):
    """An option of each layer: one for all, or that of the first glob pattern that matches its name.

    Args:
        option: what is chosen, for errors.
        given: the choice, or a mapping from patterns (see ``matches``) to choices.
        read: what makes a choice of what was given.

    Raises:
        Float8ConfigError: a key that is no pattern, or what ``read`` raises.
    """

    def __init__(self, option: str, given: Any, read: Callable[[Any], Choice]) -> None:
        self.option = option
        self._by_layer = isinstance(given, Mapping)
        by_pattern = given if isinstance(given, Mapping) else {"*": given}
        if unknown := [pattern for pattern in by_pattern if not isinstance(pattern, str)]:
            raise Float8ConfigError(
                f"{option} for layers goes by glob patterns over their names, got {unknown[0]!r}; give its name, as "
                "model.named_modules() has it"
            )
        self._choices = {pattern: read(chosen) for pattern, chosen in by_pattern.items()}

    def pattern_of(self, fqn: str) -> str | None:
        """The pattern that decides for a layer; None where none matches."""
        return next((pattern for pattern in self._choices if matches(pattern, fqn)), None)

    def of(self, fqn: str) -> Choice | None:
        """A layer's choice; None where no pattern matches."""
        pattern = self.pattern_of(fqn)
        return None if pattern is None else self._choices[pattern]

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
            for pattern in self._choices
            if pattern not in busy
        )

    def _why_idle(self, pattern: str, converted: Sequence[str], others: Mapping[str, str]) -> str:
        if taken := next((fqn for fqn in converted if matches(pattern, fqn)), None):
            return f"matches only layers that an earlier pattern matches too ({self.pattern_of(taken)!r} {taken})"
        if left := next((fqn for fqn in others if matches(pattern, fqn)), None):
            return f"matches no layer that is converted ({left}: {others[left]})"
        return "matches no linear layer"


class LayerRecipes(LayerChoices[Recipe]):
    """The recipe of each layer; none where no pattern matches, and the layer stays in high precision.

    Args:
        recipe: a recipe, its name, or a mapping from patterns to either.

    Raises:
        Float8ConfigError: an unknown recipe, or a key that is no pattern.
    """

    def __init__(self, recipe: RecipeOrName | Mapping[str, RecipeOrName]) -> None:
        super().__init__("recipe", recipe, get_recipe)


class LayerKeepX(LayerChoices[str]):
    """What each layer keeps of x; "auto" where no pattern matches.

    Args:
        keep_x: one of ``KEEP_X``, or a mapping from patterns to them.

    Raises:
        Float8ConfigError: another word, or a key that is no pattern.
    """

    def __init__(self, keep_x: str | Mapping[str, str]) -> None:
        super().__init__("keep_x", keep_x, _read_keep_x)

    def of(self, fqn: str) -> str:
        """A layer's choice."""
        return super().of(fqn) or AUTO


def _read_keep_x(chosen: Any) -> str:
    if chosen not in KEEP_X:
        raise Float8ConfigError(f"keep_x={chosen!r} is none of {', '.join(map(repr, KEEP_X))}")
    return str(chosen)


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
