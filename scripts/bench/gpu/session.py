"""One run of the script: where it measures, how much, and what it has found so far."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from scripts.table import Table


@dataclass
class Session:
    """What a group is given, and what it found."""

    device: torch.device
    tiny: bool  # whether sizes are such that a CPU is done soon
    rounds: int  # in which variants take turns
    shapes: Sequence[str] | None  # instead of the group's own
    only: Sequence[str]  # glob patterns of the names of variants; empty for all
    begin: Callable[[str], None]  # told what is measured next
    # Called whenever there is more to keep, so that a run that is cut off leaves what it had.
    save: Callable[[], None]
    ranks: int = 1  # that measure together
    checkpoint: str = "none"  # activation checkpointing of the slice's blocks
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)  # by group
    failed: dict[str, str] = field(default_factory=dict)  # what raised instead of being measured
    tables: list[Table] = field(default_factory=list)

    def sizes(self, usual: Sequence[str], tiny: Sequence[str]) -> list[tuple[int, ...]]:
        """What the user asked for, or a group's own, as numbers."""
        chosen = self.shapes or (tiny if self.tiny else usual)
        return [tuple(map(int, text.split("x"))) for text in chosen]

    @property
    def where(self) -> str:
        """For titles."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Go on after an error with what comes next; the run ends with an error then.

        Not of several ranks: those without the error would wait for this one in other collectives.
        """
        self.begin(what)
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failed[what] = f"{type(error).__name__}: {error}"
        print(f"{what}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        self.save()
        if self.ranks > 1 and what in self.failed:
            raise RuntimeError(f"{what}: {self.failed[what]}")
