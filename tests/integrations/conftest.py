"""The recipes are importable, as they are in tests/recipes."""

import tests.recipes.conftest  # noqa: F401
