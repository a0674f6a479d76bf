"""gloo ranks of this machine, of which each is a process that is new."""

from __future__ import annotations

import datetime
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``function(*arguments)`` returns on each rank, by way of JSON; a single one has no process group."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, (world, folder, function, arguments), nprocs=world)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]


def _run(
    rank: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    if world > 1:
        store, timeout = dist.FileStore(f"{folder}/store", world), datetime.timedelta(seconds=120)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    Path(folder, f"{rank}.json").write_text(json.dumps(function(*arguments)))
    if world > 1:
        dist.destroy_process_group()
