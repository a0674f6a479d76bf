"""torchtitan's own recipes after 0.3, in float8: ``--module f8sub.titan --config llama3_8b_f8sub``."""

import functools
import importlib
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from f8sub.errors import Float8ConfigError

PLACES = (
    "torchtitan_recipes.models.{family}",
    "torchtitan_recipes.tests.models.{family}",
    "torchtitan.models.{family}.config_registry",
)
"""Where torchtitan has recipes of a family of models, the first one that has a function of the name."""
FAMILIES = ("deepseek_v3", "llama3", "qwen3")
SUFFIX = "_f8sub"


def home_of(name: str) -> str | None:
    """Return torchtitan's module with the recipe that ``name`` has in float8; by its text, nothing is imported."""
    stock = name.removesuffix(SUFFIX)
    family = next((each for each in FAMILIES if stock.startswith(each)), "")
    for place in PLACES:
        package, *parts = place.format(family=family).split(".")
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations if spec is not None else None) or []:
            file = Path(folder, *parts).with_suffix(".py")
            if file.exists() and re.search(rf"^def {stock}\(", file.read_text(), re.MULTILINE):
                return ".".join([package, *parts])
    return None


def __getattr__(name: str) -> Callable[[], Any]:
    """Return torchtitan's recipe of that name with all that the transform converts in float8, by the default recipe.

    Raises:
        Float8ConfigError: torchtitan has none.
    """
    if not name.endswith(SUFFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = home_of(name)
    stock = name.removesuffix(SUFFIX)
    if home is None:
        raise Float8ConfigError(
            f"f8sub.titan.{name} is torchtitan's recipe {stock} in float8, and the one that is installed has no such "
            "recipe any more: pass one that it has to f8sub.titan.with_float8"
        )
    from f8sub.integrations.torchtitan.transform import with_float8

    recipe = getattr(importlib.import_module(home), stock)

    @functools.wraps(recipe)
    def config(*args: Any, **kwargs: Any) -> Any:
        return with_float8(recipe(*args, **kwargs))

    config.__name__ = config.__qualname__ = name
    return config
