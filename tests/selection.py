"""Which of a test's cases run by default; all of them run with ``./scripts/test.sh --all``."""

import importlib
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


def of_torchtitan_0_3(name: str) -> Any:
    """A module that torchtitan has since 0.3; the test is skipped with 0.2, and without torchtitan."""
    pytest.importorskip("torchtitan")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        pytest.skip("wants torchtitan 0.3")
