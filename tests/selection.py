"""Which of a test's cases run by default; all of them run with ``./scripts/test.sh --all``."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def long_but(chosen: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """``cases`` for ``pytest.mark.parametrize``, of which those that are not ``chosen`` are long."""
    return [
        case
        if case in chosen
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for case in cases
    ]
