"""Functions of PTX, which Triton's interpreter cannot run."""

from collections.abc import Callable
from typing import Any

import triton


def unless_interpreted(plain: Any) -> Callable[[Any], Any]:
    """Of a function of PTX: itself, or ``plain`` where Triton interprets its kernels."""
    return lambda function: plain if triton.knobs.runtime.interpret else function
