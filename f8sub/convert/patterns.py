"""Glob patterns over the names of layers: what they match, options that take them, and why one does nothing."""

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from f8sub.convert.products import kind_of
from f8sub.errors import Float8ConfigError, unknown
from f8sub.linear.saved_input import AUTO, KEEP_X
from f8sub.recipe import Recipe, get_recipe


def matches(pattern: str, fqn: str) -> bool:
    """Return whether a glob pattern matches ``fqn`` as a run of whole segments; all options that take patterns ask it.

    ``"lm_head"`` matches ``model.lm_head`` and ``lm_head.proj``, never ``lm_head2``; ``"layers.0"`` matches
    ``model.layers.0.mlp.up`` and not ``model.layers.01``; ``"layers.*.up"`` not ``layers.0.mlp.up``.
    """
    # Segment by segment, so that a * never reaches over a dot.
    segments, parts = fqn.split("."), pattern.split(".")
    return any(
        all(fnmatch.fnmatchcase(s, p) for s, p in zip(run, parts, strict=True))
        for run in runs_of(segments, len(parts))
    )


def runs_of(segments: list[str], length: int) -> list[list[str]]:
    """Return every run of so many neighbours among the segments of a name."""
    return [segments[i : i + length] for i in range(len(segments) - length + 1)]


RecipeOrName = Recipe | str

Choice = TypeVar("Choice")


class LayerChoices(Generic[Choice]):
    """Holds an option of each layer: one for all, or that of the first glob pattern that matches its name.

    Args:
        option: what is chosen, for errors.
        given: the choice, or a mapping from patterns (see ``matches``) to choices.
        read: turns what was given into a choice.
        other: the choice of a layer that no pattern matches.

    Raises:
        Float8ConfigError: a key that is no pattern, or what ``read`` raises.
    """

    def __init__(self, option: str, given: Any, read: Callable[[Any], Choice], other: Choice) -> None:
        self.option, self._other = option, other
        self.is_for_all = not isinstance(given, Mapping)
        # One choice for all is a pattern that matches every name.
        by_pattern = {"*": given} if self.is_for_all else given
        if unknown := [pattern for pattern in by_pattern if not isinstance(pattern, str)]:
            raise Float8ConfigError(
                f"{option} for layers goes by glob patterns over their names, got {unknown[0]!r}; give its name, as "
                "model.named_modules() has it"
            )
        self.by_pattern = {pattern: read(chosen) for pattern, chosen in by_pattern.items()}

    def of(self, fqn: str) -> Choice:
        """Return a layer's choice."""
        pattern = self.pattern_of(fqn)
        return self._other if pattern is None else self.by_pattern[pattern]

    def pattern_of(self, fqn: str) -> str | None:
        """Return the pattern that decides for a layer; None where none matches."""
        return next((pattern for pattern in self.by_pattern if matches(pattern, fqn)), None)


def layer_recipes(recipe: RecipeOrName | Mapping[str, RecipeOrName]) -> LayerChoices[Recipe | None]:
    """Return the recipe of each layer; None where no pattern matches, and the layer stays in high precision.

    Raises:
        Float8ConfigError: an unknown recipe, or a key that is no pattern.
    """
    return LayerChoices("recipe", recipe, get_recipe, None)


def layer_keep_x(keep_x: str | Mapping[str, str]) -> LayerChoices[str]:
    """Return what each layer keeps of x, one of ``KEEP_X``; "auto" where no pattern matches.

    Raises:
        Float8ConfigError: another word, or a key that is no pattern.
    """

    def read(chosen: Any) -> str:
        if chosen not in KEEP_X:
            raise unknown("keep_x", chosen, KEEP_X)
        return str(chosen)

    return LayerChoices("keep_x", keep_x, read, AUTO)


MOST_SUGGESTIONS = 3
"""Names that a warning about a pattern suggests."""


EARLIER = "matches only layers that an earlier pattern matches too"
"""Why a pattern is idle that another order would help."""


def why_idle(
    pattern: str, choices: LayerChoices[Any], converted: Sequence[str], others: Mapping[str, str]
) -> str:
    """Return why a pattern of an option decides for none of the converted layers.

    Args:
        pattern: the pattern.
        choices: the option.
        converted: names of the layers that are converted.
        others: the reasons of those that are not, by name.
    """
    # Those that it would decide for come first: no order of the patterns gives it others.
    left = next((fqn for fqn in others if choices.pattern_of(fqn) == pattern), None)
    taken = next((fqn for fqn in converted if matches(pattern, fqn)), None)
    if left is not None:
        apart = f" and that {choices.pattern_of(taken)!r} does not take" if taken is not None else ""
        return f"matches no layer that is converted{apart} ({left}: {others[left]})"
    if taken is not None:
        return f"{EARLIER} ({choices.pattern_of(taken)!r} {taken})"
    return with_nearest("matches no linear layer", pattern, [*converted, *others])


def with_nearest(message: str, pattern: str, names: Iterable[str]) -> str:
    """Append to a message about a pattern the runs of segments of ``names`` that look like it."""
    length = len(pattern.split("."))
    # By kind, or a model of 100 equal blocks would have its names compared 100 times.
    kinds = dict.fromkeys(map(kind_of, names))
    runs = dict.fromkeys(".".join(run) for kind in kinds for run in runs_of(kind.split("."), length))
    found = difflib.get_close_matches(pattern, list(runs), MOST_SUGGESTIONS)
    return message + (f" (nearest: {', '.join(found)})" if found else "")
