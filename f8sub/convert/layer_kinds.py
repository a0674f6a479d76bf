"""The kind of a layer: its name without the numbers of blocks."""

from collections.abc import Iterable


def kind_of(fqn: str) -> str:
    """The name with ``*`` for every number: equal layers of a stack of blocks have one kind."""
    return ".".join("*" if part.isdigit() else part for part in fqn.split("."))


def kinds(fqns: Iterable[str]) -> list[str]:
    """Each kind once, and the name of a layer that is the only one of its kind."""
    found: dict[str, list[str]] = {}
    for fqn in fqns:
        found.setdefault(kind_of(fqn), []).append(fqn)
    return list(map(name_of, found.values()))


def name_of(alike: list[str]) -> str:
    """The name of one layer, or the kind of several."""
    return alike[0] if len(alike) == 1 else kind_of(alike[0])
