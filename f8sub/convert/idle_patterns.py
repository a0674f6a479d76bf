"""Patterns of a conversion's options that do nothing: a warning, and what was meant."""

import difflib
import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from f8sub.convert.filters import IN_FLOAT8, LayerChoices, Selection
from f8sub.convert.layer_kinds import kind_of
from f8sub.convert.patterns import matches, runs_of
from f8sub.errors import Float8Warning

MOST_SUGGESTIONS = 3
"""Names that a warning about a pattern suggests."""


def idle_patterns(
    names: Sequence[str],
    reasons: Mapping[str, str | None],
    selection: Selection,
    linears: Container[str],
) -> tuple[str, ...]:
    """Patterns that do nothing, after a warning about those of each option.

    Args:
        names: of all modules.
        reasons: why each layer is not converted, one of ``IN_FLOAT8`` where it is.
        selection: what the caller said.
        linears: the names of the linear layers, which alone have a ``keep_x``.
    """
    converted = [fqn for fqn, reason in reasons.items() if reason in IN_FLOAT8]
    others = {fqn: str(reason) for fqn, reason in reasons.items() if reason not in IN_FLOAT8}
    unmatched = [("skip", p) for p in selection.skip if not any(matches(p, fqn) for fqn in names)]
    unmatched += [("filter_fqns", p) for p in selection.filter_fqns if not any(p in fqn for fqn in names)]
    found = [_with_nearest(f"{option}={p!r} matches nothing", p, names) for option, p in unmatched]
    if found:
        warnings.warn("; ".join(found), Float8Warning, stacklevel=4)
    kept = [fqn for fqn in converted if fqn in linears]
    for choices, layers in ((selection.recipes, converted), (selection.kept, kept)):
        busy = set(map(choices.pattern_of, layers))
        patterns = [pattern for pattern in choices.by_pattern if pattern not in busy]
        if choices.is_for_all or not patterns:
            continue
        idle = [f"{pattern!r} {_why_idle(pattern, choices, layers, others)}" for pattern in patterns]
        found += idle
        warnings.warn(
            f"patterns of {choices.option} that decide for no layer: {', '.join(idle)}; the first that matches a "
            "layer's name decides, so put the finer ones first",
            Float8Warning,
            stacklevel=4,
        )
    return tuple(found)


def _why_idle(
    pattern: str, choices: LayerChoices[Any], converted: Sequence[str], others: Mapping[str, str]
) -> str:
    if taken := next((fqn for fqn in converted if matches(pattern, fqn)), None):
        return (
            f"matches only layers that an earlier pattern matches too ({choices.pattern_of(taken)!r} {taken})"
        )
    if left := next((fqn for fqn in others if matches(pattern, fqn)), None):
        return f"matches no layer that is converted ({left}: {others[left]})"
    return _with_nearest("matches no linear layer", pattern, [*converted, *others])


def _with_nearest(message: str, pattern: str, names: Iterable[str]) -> str:
    """A message about a pattern that matches none of ``names``, with the runs of their segments that look like it."""
    length = len(pattern.split("."))
    kinds = dict.fromkeys(map(kind_of, names))
    runs = dict.fromkeys(".".join(run) for kind in kinds for run in runs_of(kind.split("."), length))
    found = difflib.get_close_matches(pattern, list(runs), MOST_SUGGESTIONS)
    return message + (f" (nearest: {', '.join(found)})" if found else "")
