import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

REGISTRY: dict[str, tuple[type, Callable[..., Any]]] = {}


@dataclass(kw_only=True, slots=True)
class OverrideConfig:
    imports: list[Any] = field(default_factory=list)


def override(*, target: type, fqns: Any = None, description: str = "", exact: bool = False) -> Callable:
    def register(factory: Callable[..., Any]) -> Callable[..., Any]:
        key = f"{factory.__module__}.{factory.__name__}"
        if key in REGISTRY:
            raise ValueError(f"{key} is registered already")
        REGISTRY[key] = target, factory
        return factory

    return register


def parse_cli_imports(tokens: list[str]) -> list[Any]:
    parts = [token.partition("=") for token in tokens]
    return [(target, json.loads(given)) if given else target for target, _, given in parts]


def apply_overrides(override_config: OverrideConfig, config_root: Any) -> None:
    for entry in override_config.imports:
        name, kwargs = (entry, {}) if isinstance(entry, str) else entry
        importlib.import_module(name.rpartition(".")[0])
        if name not in REGISTRY:
            raise ValueError(f"override {name!r} names no registered @override")
        target, factory = REGISTRY[name]
        for _, config, parent, attr in list(config_root.traverse(target)):
            made = factory(config, **kwargs)
            if isinstance(parent, list):
                parent[attr] = made
            else:
                setattr(parent, attr, made)
