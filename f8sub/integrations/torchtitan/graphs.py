"""Steps that torchtitan 0.3 launches though it would replay a CUDA graph of them: those that a monitor samples."""

import importlib.metadata
import sys
from typing import Any

from f8sub.errors import Float8ConfigError

_MODULES = ("torchtitan.distributed.cudagraph", "torchtitan.distributed.cuda_graph")
"""Of 0.3, and after."""


def launch_next() -> None:
    """Have torchtitan launch its next forward and backward, and neither capture nor replay them.

    Its wrapper launches a call while it has some to warm up with, also after a capture. A launched call accumulates
    into the gradients that the graph does, which torchtitan keeps in place, and takes memory beside the graph's.

    Raises:
        Float8ConfigError: torchtitan makes graphs in a way that is not known.
    """
    for wrapper in _wrappers():
        wrapper._warmup_remaining = 1


def _wrappers() -> list[Any]:
    """The graphs of this process; none where it was told to make none, or knows none."""
    module = next((sys.modules[name] for name in _MODULES if name in sys.modules), None)
    if module is None:
        return []
    found = getattr(getattr(module, "_manager", None), "_wrappers", None)
    if not isinstance(found, list) or not all(hasattr(wrapper, "_warmup_remaining") for wrapper in found):
        raise Float8ConfigError(
            f"torchtitan {importlib.metadata.version('torchtitan')} makes CUDA graphs in a way that f8sub does not "
            f"know ({module.__name__}; 0.3.0 is known), so a monitor's sampled steps cannot be launched: give "
            "--training.disable_cuda_graphs, or leave monitor_every out"
        )
    return found
