"""Glob patterns over layers' names."""

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


def runs_of(segments: list[str], length: int) -> list[list[str]]:
    """Every so many neighbours among the segments of a name."""
    return [segments[i : i + length] for i in range(len(segments) - length + 1)]
