import argparse
import importlib
from typing import Any

from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports


class ConfigLoader:
    """``--module``, ``--config`` and ``--override``: all that there is of a command line."""

    def load(self, args: list[str]) -> Any:
        parser = argparse.ArgumentParser()
        parser.add_argument("--module", required=True)
        parser.add_argument("--config", required=True)
        parser.add_argument("--override", action="append", default=[])
        given = parser.parse_args(args)
        module = importlib.import_module(given.module)
        make = getattr(module, given.config, None)
        if not callable(make):
            listed = [name for name in dir(module) if name[0].islower() and callable(getattr(module, name))]
            raise ValueError(f"config function {given.config!r} is not in {given.module}; it has {listed}")
        config = make()
        if given.override:
            apply_overrides(OverrideConfig(imports=parse_cli_imports(given.override)), config)
        return config
