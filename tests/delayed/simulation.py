"""TransformerEngine's documented delayed scaling in plain Python, one tensor at a time; shares no code with f8sub.

Row 0 of a history is staging, rows 1 and on are oldest to newest. An update picks an amax of all rows, makes the
scale of it, drops the oldest row, and moves staging to the end.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}


def scale_of(amax: float, fp8_max: float, margin: float) -> np.float32:
    """Divided in float64, rounded once."""
    return np.float32(min(fp8_max / (float(amax) * 2.0**margin), 2.0**126))


@dataclass
class Simulation:
    """One tensor's history and scale."""

    length: int
    fp8_max: float
    algorithm: str | Callable[[list[float]], float] = "max"
    margin: float = 0
    interval: int = 1
    history: list[float] = field(init=False)
    scale: np.float32 | None = None
    steps_since: int = 0

    def __post_init__(self) -> None:
        self.history = [0.0] * self.length

    def stage(self, amax: float) -> None:
        self.history[0] = max(self.history[0], float(amax))

    def update(self) -> None:
        if self.history[0] == 0:
            return  # not seen: nothing moves
        if self.algorithm == "max":
            amax = max(self.history)
        elif self.algorithm == "most_recent":
            amax = self.history[0]
        else:
            amax = self.algorithm(self.history)
        self.steps_since += 1
        if self.scale is None or self.steps_since >= self.interval:
            self.scale, self.steps_since = scale_of(amax, self.fp8_max, self.margin), 0
        self.history = [*self.history[1:], self.history[0]]
        self.history[0] = 0.0
