"""SkippedSteps: whether steps of a conversion's weights are skipped where a gradient is not finite."""

import weakref
from typing import Any

from f8sub.weights.conversion import Conversion
from f8sub.weights.guests import Guest


class SkippedSteps(Guest):
    """What skips the steps of a conversion's weights.

    Attributes:
        guards: that which skips them; each lives with its optimizer.
    """

    def __init__(self, conversion: Conversion) -> None:
        self.guards: weakref.WeakSet[Any] = weakref.WeakSet()
