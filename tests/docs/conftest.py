"""The recipes are importable, as they are in tests/recipes; each example has an accelerate that nobody set up."""

import sys

import pytest

import tests.recipes.conftest  # noqa: F401


@pytest.fixture(autouse=True)
def _accelerate_of_its_own():
    """Accelerate keeps its state for the process."""
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        for each in (state.AcceleratorState, state.GradientState, state.PartialState):
            each._reset_state()
