"""Bodies for ranks of the ``titan`` fixture. Nothing here imports torchtitan before a rank runs it."""

import functools
import importlib
import importlib.metadata
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.hooks import RemovableHandle

from f8sub.delayed.state import states_of
from f8sub.diagnostics.sample import Sample
from f8sub.weights.exchange import Exchange
from scripts.bench.timing import version_of
from tests.integrations.torchtitan import gloo


def installed() -> str | None:
    """torchtitan's version without the last number, as in "0.3"."""
    version = version_of("torchtitan")
    return version and version.rpartition(".")[0]


CPU = {"0.3": "tests.integrations.torchtitan.cpu", "0.2": "tests.integrations.torchtitan.cpu_0_2"}
"""What makes each version run on CPUs."""


def trainer_of(rank: int, arguments: list[str], folder: Path) -> Any:
    return importlib.import_module(CPU[installed()]).trainer_of(rank, arguments, folder)


def train(rank: int, world: int, arguments: list[str], folder: Path, count: bool = False) -> dict[str, Any]:
    return gloo.train(trainer_of(rank, arguments, folder), count=count)


class Graphs:
    """torchtitan 0.3's wrapper for CUDA graphs, imitated on a CPU: what it captures and replays runs each time.

    It launches ``_warmup_remaining`` calls, captures the next and replays that from then on. A replay calls no hook,
    and nothing is compiled in a capture.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self._warmup_remaining, self.kinds = 1, []
        self._run = run

    def __call__(self, *args: Any) -> Any:
        if self._warmup_remaining:
            self._warmup_remaining -= 1
            self.kinds.append("launched")
            return self._run(*args)
        self.kinds.append("replayed" if "captured" in self.kinds else "captured")
        with pytest.MonkeyPatch.context() as patch:
            for name, module in list(sys.modules.items()):
                if name.startswith("f8sub.") and hasattr(module, "is_capturing"):
                    patch.setattr(module, "is_capturing", lambda tensor: True)
            if self.kinds[-1] == "replayed":
                for name in ("_note", "_note_weight", "_note_dy", "_note_gradients"):
                    patch.setattr(Sample, name, lambda *args: None)
            with torch.compiler.set_stance("fail_on_recompile"):
                return self._run(*args)


def train_graphed(
    rank: int, world: int, arguments: list[str], folder: Path, usual: list[str] | None = None
) -> dict[str, Any]:
    """As ``train``, in the order of calls that torchtitan has by default on a GPU; and ``kinds`` of its calls.

    With ``usual``, arguments of a second run, also ``launched``: its losses, of steps that are launched. It takes the
    code that was compiled for the first, which knows hooks by their numbers.
    """
    from torchtitan.distributed import cudagraph

    first_hook = RemovableHandle.next_id

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "settles_at_once", True)
        trainer = trainer_of(rank, [*arguments, "training.disable_cuda_graphs=false"], folder)
        graphs = trainer.fwd_bwd_fn = Graphs(trainer.fwd_bwd_fn)
        patch.setattr(cudagraph._manager, "_wrappers", [graphs])
        found = gloo.train(trainer) | {"kinds": graphs.kinds}
    if usual is not None:
        RemovableHandle.next_id = first_hook
        found["launched"] = train(rank, world, usual, folder)["losses"]
    return found


def ages(rank: int, world: int, arguments: list[str], folder: Path) -> list[int]:
    """Of each float8 layer after a run of 3 steps, how many of its weight's last 3 amaxes there are."""
    import f8sub

    trainer = trainer_of(rank, arguments, folder)
    trainer.train()
    layers = [m for m in trainer.model_parts[0].modules() if isinstance(m, f8sub.Float8Linear)]
    f8sub.precompute_scales(trainer.model_parts)
    return [int((states_of(layer)[0].history_w[-3:] > 0).sum()) for layer in layers]


def last(losses: dict[int, float]) -> float:
    """The loss of the last of five steps."""
    assert list(losses) == [1, 2, 3, 4, 5]
    return losses[5]


def gathered(bytes: Counter[tuple[str, str]]) -> int:
    return sum(count for (kind, _), count in bytes.items() if kind == "allgather")


def more_all_reduces(ours: dict[str, Any], bf16: dict[str, Any], step: int) -> dict[tuple[str, str], int]:
    """By kind and dtype: those of one run that another does not have."""
    more = Counter(ours["calls"][step])
    more.subtract(bf16["calls"][step])
    return {key: n for key, n in more.items() if n and key[0] == "allreduce"}


def alone(test: Callable[..., None], titan: str = "titan") -> Callable[..., None]:
    """A test that runs in a process of its own that has torchtitan; ``titan`` names the fixture of its version."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        arguments.pop(titan)(1, _call, test.__module__, test.__name__, arguments)

    own = inspect.signature(test)
    fixture = inspect.Parameter(titan, inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), fixture])  # type: ignore[attr-defined]
    return run


def _call(rank: int, world: int, module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(sys.modules[module], name).__wrapped__(**arguments)
