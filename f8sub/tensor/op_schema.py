"""Describes what an operator does to tensors, read off its schema."""

from typing import Any, NamedTuple


class Operator(NamedTuple):
    """Describes what an operator does to its arguments.

    Attributes:
        func: the operator itself, kept alive because it is looked up by identity.
        written: (position, name) of every argument that it writes to.
        is_view: whether its result shares the first argument's storage.
    """

    func: Any
    written: tuple[tuple[int, str], ...]
    is_view: bool


_OPERATORS: dict[int, Operator] = {}
"""By identity of the operator: hashing one takes longer than marking a cell."""


def describe(func: Any) -> Operator:
    """Return what an operator does, by its schema; read off once for each operator."""
    if (known := _OPERATORS.get(id(func))) is not None:
        return known
    written = tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    if func.name().startswith("c10d::") and func.name().endswith("_"):
        written = ((0, func._schema.arguments[0].name),)  # which the schemas of collectives do not say
    returned = (result.alias_info for result in func._schema.returns)
    # A result that aliases an argument and is not written to is a view; one that is written to is an in-place result.
    is_view = any(alias is not None and not alias.is_write for alias in returned)
    _OPERATORS[id(func)] = Operator(func, written, is_view)
    return _OPERATORS[id(func)]
