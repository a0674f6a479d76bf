"""Ranks: new processes of this machine with gloo, and those that torchrun started."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import tempfile
from collections.abc import Callable, Iterator
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


def world_size() -> int:
    """Ranks that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Of all ranks that torchrun started, else of this process alone; NCCL's on GPUs.

    What raises on one rank ends it, and torchrun the others; they wait in a collective for two minutes at most.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if world_size() > 1:
        dist.init_process_group(backend, timeout=datetime.timedelta(minutes=2))
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
