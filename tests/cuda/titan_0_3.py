"""torchtitan 0.3 on GPUs and NCCL: bodies of ranks, and what torch before 2.14 lacks that it imports.

Importing this imports torchtitan, which starts CUDA: nothing imports it but ranks, which run job after job.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.distributed_c10d import _set_pg_timeout

if not hasattr(
    torch.distributed.fsdp, "DataParallelMeshDims"
):  # a type of spmd_types, which partial_dtensor is not

    class DataParallelMeshDims:
        """A name to import."""

    torch.distributed.fsdp.DataParallelMeshDims = DataParallelMeshDims
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = lambda timeout, group=None: _set_pg_timeout(timeout, group)

import torchtitan.trainer
from torchtitan.distributed import cudagraph
from torchtitan.tools.logging import init_logger

from tests.features.torchtitan import configs, gloo

torchtitan.trainer.time = gloo.without_sleep(torchtitan.trainer.time)


def train_each(rank: int, world: int, jobs: list[str], folder: Path) -> list[dict[str, Any]]:
    """Of each job what ``train`` returns."""
    gloo.as_rank(rank, folder)
    os.environ["LOCAL_RANK"] = str(rank)
    init_logger()
    found = []
    for job in jobs:
        try:
            found.append(train(job.split(), folder))
        except Exception as error:
            raise RuntimeError(f"after {len(found)} jobs that ended well: {job}") from error
    return found


def train(arguments: list[str], folder: Path) -> dict[str, Any]:
    """As ``gloo.train``; and ``captured``: of each of torchtitan's graphs, whether it was captured."""
    torch._dynamo.reset()  # models of several jobs have the same code, which is compiled for so many alone
    trainer = configs.configured(arguments, folder).build()
    close, captured = trainer.close, []

    def closed() -> None:
        captured.extend(wrapper._graph is not None for wrapper in cudagraph._manager._wrappers)
        close()

    trainer.close = closed
    return gloo.train(trainer) | {"captured": captured}
