"""titan_layers, and traces of the GPU alone, by ``--experimental.custom_import=scripts.bench.gpu.titan_trace``.

torchtitan traces what the host does, too. That slows the host so much that it cannot keep ahead of the GPU, and the
trace then shows gaps and communication that no run without a trace has.
"""

from __future__ import annotations

from typing import Any

import torch.profiler

from scripts.bench.gpu import titan_layers  # noqa: F401  (its flavors enter torchtitan's)

of_everything: Any = torch.profiler.profile


def of_the_gpu(**options: Any) -> Any:
    """``torch.profiler.profile`` of kernels and their launches."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    return of_everything(**{**options, "activities": activities, "record_shapes": False})


torch.profiler.profile = of_the_gpu  # type: ignore[assignment,misc]
