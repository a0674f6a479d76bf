"""Bodies for ranks of the ``titan`` fixture. Nothing here imports torchtitan before a rank runs it."""

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def make_assets(rank: int, world: int, folder: Path) -> None:
    from tests.titan import cpu

    cpu.make_assets(rank, world, folder)


def train(rank: int, world: int, arguments: list[str], folder: Path) -> dict[str, Any]:
    from tests.titan import cpu

    return cpu.train(rank, world, arguments, folder)


def count(rank: int, world: int, arguments: list[str], folder: Path) -> dict[str, Any]:
    from tests.titan import cpu

    return cpu.train(rank, world, arguments, folder, count=True)


def ages(rank: int, world: int, arguments: list[str], folder: Path) -> list[int]:
    """Of each float8 layer after a run of 3 steps, how many of its weight's last 3 amaxes there are."""
    import f8sub
    from tests.titan import cpu

    trainer = cpu.trainer_of(rank, arguments, folder)
    trainer.train()
    layers = [m for m in trainer.model_parts[0].modules() if isinstance(m, f8sub.Float8Linear)]
    f8sub.precompute_scales(trainer.model_parts)
    return [int((layer.states()[0].history_w[-3:] > 0).sum()) for layer in layers]


def alone(test: Callable[..., None]) -> Callable[..., None]:
    """A test that runs in a process of its own that has torchtitan."""

    @functools.wraps(test)
    def run(titan: Callable[..., list[Any]], **arguments: Any) -> None:
        titan(1, _call, test.__module__, test.__name__, arguments)

    own = inspect.signature(test)
    fixture = inspect.Parameter("titan", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), fixture])  # type: ignore[attr-defined]
    return run


def _call(rank: int, world: int, module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(sys.modules[module], name).__wrapped__(**arguments)
