"""Glob patterns over layers' names: what they match, and what was meant by one that matches nothing."""

import difflib
import fnmatch
from collections.abc import Iterable

MOST_SUGGESTIONS = 3
"""Names that a warning about a pattern suggests."""


def matches(pattern: str, fqn: str) -> bool:
    """Whether a glob pattern matches ``fqn`` as a run of whole segments.

    ``"lm_head"`` matches ``model.lm_head`` and ``lm_head.proj``, never ``lm_head2``; ``"layers.0"`` matches
    ``model.layers.0.mlp.up`` and not ``model.layers.01``.
    """
    segments, parts = fqn.split("."), pattern.split(".")
    return any(
        all(fnmatch.fnmatchcase(s, p) for s, p in zip(run, parts, strict=True))
        for run in _runs(segments, len(parts))
    )


def kind_of(fqn: str) -> str:
    """The name with ``*`` for every number: equal layers of a stack of blocks have one kind."""
    return ".".join("*" if part.isdigit() else part for part in fqn.split("."))


def name_of(alike: list[str]) -> str:
    """The name of one layer, or the kind of several."""
    return alike[0] if len(alike) == 1 else kind_of(alike[0])


def with_nearest(message: str, pattern: str, names: Iterable[str]) -> str:
    """A message about a pattern that matches none of ``names``, with the runs of their segments that look like it."""
    length = len(pattern.split("."))
    kinds = dict.fromkeys(map(kind_of, names))
    runs = dict.fromkeys(".".join(run) for kind in kinds for run in _runs(kind.split("."), length))
    found = difflib.get_close_matches(pattern, list(runs), MOST_SUGGESTIONS)
    return message + (f" (nearest: {', '.join(found)})" if found else "")


def _runs(segments: list[str], length: int) -> list[list[str]]:
    return [segments[i : i + length] for i in range(len(segments) - length + 1)]
