"""torchtitan 0.2 as it is, on GPUs and NCCL: bodies of ranks. Nothing here imports torchtitan before a rank runs it."""

import datetime
import faulthandler
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import _set_pg_timeout

from tests.integrations.torchtitan import gloo, jobs_0_2

PATIENCE = 20
"""Seconds for a collective of a step that compiles nothing any more."""


def trainer_of(rank: int, arguments: list[str], folder: Path) -> Any:
    import torchtitan.train
    from torchtitan.tools.logging import init_logger

    gloo.as_rank(rank, folder)
    os.environ["LOCAL_RANK"] = str(rank)
    torchtitan.train.time = gloo.without_sleep(torchtitan.train.time)
    jobs_0_2.with_few_layers()
    init_logger()
    return torchtitan.train.Trainer(jobs_0_2.configured(arguments, folder, emulate=False))


def train(rank: int, world: int, arguments: list[str], folder: Path, count: bool = False) -> dict[str, Any]:
    return gloo.train(trainer_of(rank, arguments, folder), count=count)


def train_asynchronously(
    rank: int, world: int, arguments: list[str], folder: Path
) -> tuple[dict[int, float], dict[str, int]]:
    """Losses of a run with asynchronous tensor parallelism, and how often each operator on symmetric memory ran.

    A rank that hangs says where: torchtitan's log tells the step, all threads show where they stand after a minute, and
    NCCL names a collective that takes longer than ``PATIENCE``. Kernels on symmetric memory wait without an end.
    """
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    faulthandler.dump_traceback_later(60, file=2)
    trainer = trainer_of(rank, [*arguments, f"--comm.train_timeout_seconds={PATIENCE}"], folder)
    group = trainer.parallel_dims.get_mesh("tp").get_group()
    _set_pg_timeout(datetime.timedelta(seconds=2 * PATIENCE), group)  # of the first step, which compiles
    # torchtitan 0.2 leaves that to torch, and torch 2.11 does not fuse where it was not called.
    enable_symm_mem_for_group(group.group_name)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        losses = gloo.train(trainer)["losses"]
    ran = {event.key: event.count for event in profile.key_averages() if event.key.startswith("symm_mem::")}
    return losses, ran
