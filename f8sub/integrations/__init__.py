"""Modules that other libraries call; each needs the library of its name, and is imported when it is first named."""

import importlib
from typing import Any

from f8sub.errors import no_attribute

_MODULES = ("accelerate", "axolotl", "lightning", "torchao", "torchtitan", "transformers")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise no_attribute(__name__, name, _MODULES)
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted(_MODULES)
