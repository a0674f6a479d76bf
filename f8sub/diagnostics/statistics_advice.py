"""What to do about an operand, by rules from its statistics."""

from collections.abc import Callable
from typing import NamedTuple

from f8sub.diagnostics.statistics import Statistics


class Rule(NamedTuple):
    """One rule.

    Attributes:
        name: in one word.
        applies: whether it does.
        advice: what to do.
    """

    name: str
    applies: Callable[[Statistics], bool]
    advice: str


RULES = (
    Rule(
        "outliers",
        lambda s: s.row_sqnr < s.sqnr - 6,
        "a few large rows decide the scale of all: give this layer a recipe with scales of rows or blocks",
    ),
    Rule(
        "saturated",
        lambda s: s.saturated > 1e-3 and s.sqnr < 25,
        "values exceed what the scale was made for: more margin, or a recipe that scales by the current amax",
    ),
    Rule(
        "flushed",
        lambda s: s.flushed > 0.2,
        "small values become 0: give this layer a recipe with smaller tiles",
    ),
    Rule(
        "poor",
        lambda s: s.row_sqnr < 15,
        "float8 keeps little of it: skip this layer, or with_high_precision for the GEMMs that read it",
    ),
)
"""In order; the first that applies is told.

e4m3 keeps 31.5 dB of a Gaussian and e5m2 25.4; 6 dB is a bit. The limits separate the data sets of the tests: a
Gaussian triggers no rule, each known trouble its own.
"""


def advice_for(statistics: Statistics) -> str:
    """What to do; empty where nothing is wrong."""
    return next((rule.advice for rule in RULES if rule.applies(statistics)), "")
