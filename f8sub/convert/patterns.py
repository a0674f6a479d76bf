"""Glob patterns over layers' names, and names that stand for several."""

import fnmatch


def matches(pattern: str, fqn: str) -> bool:
    """Whether a glob pattern matches ``fqn`` as a run of whole segments.

    ``"lm_head"`` matches ``model.lm_head`` and ``lm_head.proj``, never ``lm_head2``; ``"layers.0"`` matches
    ``model.layers.0.mlp.up`` and not ``model.layers.01``.
    """
    segments, parts = fqn.split("."), pattern.split(".")
    return any(
        all(fnmatch.fnmatchcase(s, p) for s, p in zip(run, parts, strict=True))
        for run in runs_of(segments, len(parts))
    )


def kind_of(fqn: str) -> str:
    """The name with ``*`` for every number: equal layers of a stack of blocks have one kind."""
    return ".".join("*" if part.isdigit() else part for part in fqn.split("."))


def name_of(alike: list[str]) -> str:
    """The name of one layer, or the kind of several."""
    return alike[0] if len(alike) == 1 else kind_of(alike[0])


def runs_of(segments: list[str], length: int) -> list[list[str]]:
    """Every so many neighbours among the segments of a name."""
    return [segments[i : i + length] for i in range(len(segments) - length + 1)]
