"""What the options ``experts`` and ``tokens`` may be."""

from typing import Any

from f8sub.errors import Float8ConfigError

AUTO_EXPERTS = "auto"
"""The value of ``experts`` that converts those which gain."""


def refuse_unknown_experts(experts: Any, tokens: Any) -> None:
    """Raise Float8ConfigError where ``experts`` is no bool and not "auto", or ``tokens`` no count and not None."""
    if experts not in (True, False, AUTO_EXPERTS):
        raise Float8ConfigError(f"experts is True, False or {AUTO_EXPERTS!r}, got {experts!r}")
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        raise Float8ConfigError(f"tokens is how many one forward has, or None, got {tokens!r}")
