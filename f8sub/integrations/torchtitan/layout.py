"""Finds which torchtitan is installed, and what ``f8sub.titan`` has for it; imports none of it until it is asked.

A torchtitan is known by where its modules lie, not by its number: what users install from its repository has the number
of the release before.
"""

import importlib
import importlib.metadata
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from f8sub.errors import Float8ConfigError, no_attribute

__all__ = ["LAYOUTS", "Layout", "attribute", "installed", "names", "register"]

_ROOM = "f8sub.integrations.torchtitan"

READY_MADE = (
    "deepseek_v3_16b_f8sub",
    "deepseek_v3_671b_f8sub",
    "deepseek_v3_debugmodel_f8sub",
    "llama3_8b_f8sub",
    "llama3_70b_f8sub",
    "llama3_405b_f8sub",
    "llama3_debugmodel_f8sub",
    "qwen3_0_6b_f8sub",
    "qwen3_14b_f8sub",
    "qwen3_30b_a3b_f8sub",
    "qwen3_32b_f8sub",
    "qwen3_debugmodel_f8sub",
    "qwen3_moe_debug_f8sub",
)
"""Configs of torchtitan 0.3 that are there in float8; a later torchtitan has some of them."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Describes a torchtitan that f8sub knows.

    Attributes:
        name: what users call it.
        tested: the version, or the day of the repository, that f8sub was tested or read with.
        has: files and folders of the package that tell it from the others.
        homes: names of ``f8sub.titan`` -> the modules that have them, below ``f8sub.integrations.torchtitan``.
        looked_for: one of them, whose module registers what torchtitan looks for when it imported ``f8sub.titan``.
        instead: how a model is converted here.
    """

    name: str
    tested: str
    has: tuple[str, ...]
    homes: Mapping[str, str]
    looked_for: str
    instead: str


_OVERRIDES = dict.fromkeys(("float8", "precompute_scales"), "overrides")

LAYOUTS = (
    Layout(
        "0.2",
        "0.2.2",
        ("protocols/model_converter.py", "protocols/train_spec.py"),
        dict.fromkeys(("Float8ModelConverter", "JobConfig"), "torchtitan_0_2"),
        "Float8ModelConverter",
        "--job.custom_config_module=f8sub.titan --model.converters=f8sub",
    ),
    Layout(
        "0.3",
        "0.3.0",
        ("protocols/model_spec.py", "components/quantization/__init__.py", "config/override.py"),
        {
            **_OVERRIDES,
            **dict.fromkeys(("Float8Converter", "with_float8", "with_precompute_scales"), "converter"),
            **dict.fromkeys(READY_MADE, "configs"),
        },
        "float8",
        "Float8Converter, with_float8(model_spec), or the override f8sub.titan.float8",
    ),
    Layout(
        "after 0.3",
        "its main of October 2026, read, not run",
        ("config/transform/__init__.py", "config/override.py", "quantization/__init__.py"),
        {
            **_OVERRIDES,
            **dict.fromkeys(("Float8Transform", "with_float8"), "transform"),
            **dict.fromkeys(READY_MADE, "recipes"),
        },
        "float8",
        "Float8Transform, with_float8(config), or the override f8sub.titan.float8",
    ),
)

NAMES = frozenset(name for layout in LAYOUTS for name in layout.homes)
"""All names of ``f8sub.titan``, of any torchtitan."""


def installed() -> Layout:
    """Return the layout of the torchtitan that is installed.

    Raises:
        Float8ConfigError: none is installed, or it is laid out as none that f8sub knows.
    """
    folder = _folder()
    if folder is None:
        raise Float8ConfigError(
            "f8sub.titan is for torchtitan, which is not installed: pip install torchtitan"
        )
    missing = {layout: [file for file in layout.has if not (folder / file).exists()] for layout in LAYOUTS}
    # By files, not by version: what users install from the repository has the number of the release before.
    found = [layout for layout, files in missing.items() if not files]
    if not found:
        known = "; ".join(
            f"{layout.name} ({layout.tested}), of which {', '.join(files)} is missing"
            for layout, files in missing.items()
        )
        raise Float8ConfigError(
            f"torchtitan {_version()} in {folder} is laid out in a way that f8sub does not know. It knows {known}. "
            "Install one of these, or a newer f8sub"
        )
    return found[0]


def attribute(name: str) -> Any:
    """Return what ``f8sub.titan`` has by that name, for the torchtitan that is installed.

    Raises:
        AttributeError: f8sub has no such name for any torchtitan.
        Float8ConfigError: it has none for this one, or what it needs of torchtitan is not where it was.
    """
    if name not in NAMES:
        raise no_attribute("f8sub.titan", name, NAMES)
    layout = installed()
    if name not in layout.homes:
        others = " and ".join(other.name for other in LAYOUTS if name in other.homes)
        raise Float8ConfigError(
            f"f8sub.titan.{name} is for torchtitan {others}, and {_version()} is installed, of the layout "
            f"{layout.name}: take {layout.instead}"
        )
    try:
        return getattr(importlib.import_module(f"{_ROOM}.{layout.homes[name]}"), name)
    except ImportError as error:
        raise Float8ConfigError(
            f"f8sub.titan.{name} cannot be had of torchtitan {_version()} in {_folder()}: {error}. It has the layout "
            f"{layout.name}, of which f8sub knows {layout.tested}; its own requirements may not be met either, such as "
            "a newer torch"
        ) from error


def names() -> list[str]:
    """Return the names of ``f8sub.titan`` for the torchtitan that is installed; none where its layout is unknown."""
    try:
        layout = installed()
    except Float8ConfigError:
        return []
    homes = sorted(layout.homes)
    if "recipes" in layout.homes.values():
        # After 0.3 recipes come and go, so each name is looked for.
        recipes = importlib.import_module(f"{_ROOM}.recipes")
        homes = [name for name in homes if layout.homes[name] != "recipes" or recipes.home_of(name)]
    return homes


def register() -> None:
    """Have torchtitan know what it looks for by name, right after it imported ``f8sub.titan``.

    Where it is not torchtitan that imports it, what goes wrong is reported to whoever asks for a name.

    Raises:
        Float8ConfigError: as of ``attribute``, where torchtitan's config system runs.
    """
    # Its config system imports ``f8sub.titan`` by name; a user's ``import f8sub.titan`` may come without torchtitan.
    torchtitan_runs = "torchtitan.config" in sys.modules
    try:
        attribute(installed().looked_for)
    except Float8ConfigError:
        if torchtitan_runs:
            raise


def _folder() -> Path | None:
    """Return the package's folder; None where it is not installed."""
    # Finds the package without importing it, which takes seconds and may fail.
    spec = find_spec("torchtitan")
    places = (spec.submodule_search_locations if spec is not None else None) or []
    return next((Path(place) for place in places), None)


def _version() -> str:
    try:
        return importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        return "(a version unknown)"
