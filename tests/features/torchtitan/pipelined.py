"""Asynchronous tensor parallelism where there is no symmetric memory: Inductor's own pass, and torch's own fallbacks of
the operators that it puts in the place of collectives and products. For ranks of torchtitan 0.2.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.features.torchtitan import gloo, runs

FUSED = (
    "fused_all_gather_matmul",
    "fused_all_gather_scaled_matmul",
    "fused_matmul_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter",
)


def train(
    rank: int, world: int, arguments: list[str], folder: Path
) -> tuple[dict[int, float], dict[str, int]]:
    """Losses of a run of TP 2, compiled without generating code, and how often each fused operator ran."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.registry import register_backend
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes import micro_pipeline_tp, post_grad

    dist.is_nccl_available = lambda: True  # the pass asks for nothing else of NCCL
    ran: Counter[str] = Counter()
    library = torch.library.Library("symm_mem", "IMPL")

    def counted(name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            ran[name] += 1
            return getattr(symmetric, f"_{name}_fallback")(*args, **kwargs)

        return run

    for name in FUSED:
        library.impl(name, counted(name), "CPU")

    def fuse(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        post_grad.view_to_reshape(graph)
        micro_pipeline_tp.micro_pipeline_tp_pass(graph.graph)
        graph.recompile()
        return make_boxed_func(graph.forward)

    register_backend(
        aot_autograd(fw_compiler=fuse, bw_compiler=fuse, decompositions=select_decomp_table), name="pipelined"
    )
    how = ("--compile.enable", "--compile.backend=pipelined", "--compile.components=model")
    asynchronously = [*arguments, *how, "--parallelism.enable_async_tensor_parallel"]
    with symmetric._test_mode():
        losses = gloo.train(runs.trainer_of(rank, asynchronously, folder))["losses"]
    return losses, dict(ran)
