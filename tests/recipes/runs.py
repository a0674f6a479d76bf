"""Small training runs, made in the forked ranks of the ``ranks`` fixture."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from f8sub_pretrain.model import SIZES
from f8sub_pretrain.settings import Settings, parse
from pretrain import StopRequest, Trainer
from torch.distributed.device_mesh import init_device_mesh

QUICK = (
    "--training.steps 4 --training.seq_len 32 --training.local_batch_size 2 --eval.interval 0 "
    "--metrics.tensorboard false --training.device cpu"
)
BLOCKS = 2
"""Of the models that are trained here, half of what the debug sizes have."""


def quick_settings(folder: Path, options: str = "") -> Settings:
    """A few steps of the debug model; ``options`` are command-line options over that."""
    chosen = dict(zip(*[iter(f"{QUICK} {options}".split())] * 2, strict=True))
    chosen["--job.dump_folder"] = str(folder)
    return parse([word for pair in chosen.items() for word in pair])


def changed(settings: Settings, section: str, **values: Any) -> Settings:
    new = dataclasses.replace(getattr(settings, section), **values)
    return dataclasses.replace(settings, **{section: new})


def trainer(world: int, settings: Settings, title: str = "test") -> Trainer:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    SIZES[settings.model.size] = {**SIZES[settings.model.size], "num_hidden_layers": BLOCKS}  # in this rank
    return Trainer(settings, mesh, StopRequest(), title)


def train(rank: int, world: int, settings: Settings) -> bool:
    """A body for ``ranks``: whether the run came to its end."""
    return trainer(world, settings).run()


def train_as_launched(rank: int, world: int, settings: Settings) -> bool:
    """As ``train``, of as many blocks as the command trains: for comparisons with processes that a launcher starts."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    return Trainer(settings, mesh, StopRequest(), "test").run()


def records(settings: Settings) -> list[dict[str, Any]]:
    lines = (Path(settings.job.dump_folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses(settings: Settings) -> list[float]:
    return [record["loss"] for record in records(settings) if "loss" in record]
