"""The backward pass that runs, and the hook that packs what is saved; torch has no public names for them."""

from typing import Any

import torch


def graph_task() -> int:
    """Number of the backward pass that runs on this thread, -1 outside of any."""
    return torch._C._current_graph_task_id()


def saved_tensors_hook() -> Any:
    """The hook that packs what is saved for backward now; None without one. Non-reentrant checkpoints push theirs."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]
