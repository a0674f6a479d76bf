"""A whole training step as one CUDA graph: recorded, compared with steps that Python launches, and replayed.

f8sub's eager layers keep no codes of a weight that a graph changes, so beside one they cast it once more a step,
launched or replayed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from scripts.bench.gpu.llama import Batch, Trainer

LAUNCHED, GRAPHED = "step", "graphed"
STEPS = 6
LARGEST_ERROR = 0.05
"""Of a loss, as a part of how far the losses moved, where the same steps launched twice differ."""

COLUMNS = (
    ("launched ms", "{step[median_ms]:.2f}"),
    ("spread", "{step[spread_ms]:.2f}"),
    ("over bf16", "{step[over_bf16]:.2f}x"),
    ("host ms", "{host_ms[step]:.1f}"),
    ("graph ms", "{graphed[median_ms]:.2f}"),
    ("spread", "{graphed[spread_ms]:.2f}"),
    ("over bf16", "{graphed[over_bf16]:.2f}x"),
    ("host ms", "{host_ms[graphed]:.1f}"),
    ("peak GB", "{peak_bytes[step]/1e9:.1f}"),
    ("graph GB", "{graph[bytes]/1e9:.1f}"),
    ("kernels", "{launches:d}"),
    ("losses differ by", "{graph[error]/1e-2:.2g} %"),
)

Step = Callable[[Batch], torch.Tensor]
"""A training step; its loss."""


def record(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor, int]:
    """One CUDA graph of ``run``, after a call that is not recorded.

    Returns:
        What replays it, the tensor that every replay writes the result to, and the bytes that the graph keeps.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog queries events meanwhile, in a thread of its own.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = run()
    return graph.replay, result, torch.cuda.memory_reserved() - reserved


class GraphedStep:
    """All of a trainer's step as one CUDA graph; a call copies a batch to where the graph reads it, and replays.

    ``bytes`` of GPU memory are what the graph keeps for what is allocated in a step.
    """

    def __init__(self, trainer: Trainer, batch: Batch) -> None:
        given = dataclasses.replace(batch, tokens=batch.tokens.clone(), targets=batch.targets.clone())
        self._given = given
        self._replay, self._loss, self.bytes = record(lambda: trainer.step(given))

    def __call__(self, batch: Batch) -> torch.Tensor:
        """The loss, until the next call."""
        self._given.tokens.copy_(batch.tokens)
        self._given.targets.copy_(batch.targets)
        self._replay()
        return self._loss


def recorded(trainer: Trainer, batches: Sequence[Batch]) -> tuple[GraphedStep, dict[str, Any]]:
    """The trainer's step as a graph, and its figures; an error where it does not train as launched steps do."""
    restore = trainer.saved()

    def losses(step: Step) -> list[float]:
        restore()
        return [float(step(batches[index % len(batches)])) for index in range(STEPS)]

    launched, again = losses(trainer.step), losses(trainer.step)
    graphed = GraphedStep(trainer, batches[0])
    found = compare(losses(graphed), launched, again)
    return graphed, {"bytes": graphed.bytes, **found}


def compare(graphed: list[float], launched: list[float], again: list[float]) -> dict[str, Any]:
    """Losses of the same steps: replayed, and launched twice.

    An error where they differ and launched ones do not, or differ by more than ``LARGEST_ERROR``.

    Returns:
        All of ``graphed`` and ``launched``, and the largest difference as a part of how far the losses moved.
    """
    errors = [abs(a - b) for a, b in zip(graphed, launched, strict=True)]
    moved = max(launched) - min(launched)
    bound = 0.0 if again == launched else LARGEST_ERROR * moved
    if not all(error <= bound for error in errors):
        raise RuntimeError(f"losses of replayed steps {graphed}, of launched ones {launched} and {again}")
    error = max(errors) / moved if any(errors) else 0.0
    return {"losses": graphed, "launched_losses": launched, "error": error}
