"""recipes/pretrain.py, one rank of which dies by SIGKILL in its first life, at the point that ``KILL_AT`` names.

KILL_AT='async save' torchrun --nproc-per-node 2 --max-restarts 1 tests/faults/ranks/killed_pretrain.py ...
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pretrain
from torch.distributed.checkpoint import FileSystemWriter

from f8sub.weights.exchange import Exchange

STEP, RANK = 4, "1"
MORTAL = os.environ["RANK"] == RANK and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
begun = [0]
"""Steps that have begun, in order."""


def nothing(_) -> None:
    pass


def wrap(cls: type, name: str, before: Callable = nothing, after: Callable = nothing) -> None:
    method = getattr(cls, name)

    def wrapped(self, *args, **kwargs):
        before(self)
        result = method(self, *args, **kwargs)
        after(self)
        return result

    setattr(cls, name, wrapped)


def die(*_) -> None:
    if begun[-1] >= STEP:
        os.kill(os.getpid(), signal.SIGKILL)


def halve_and_die(writer: FileSystemWriter) -> None:
    """Half of this rank's file is on the disk, and nothing follows: in the background, in the next step."""
    while begun[-1] == STEP:
        time.sleep(0.01)
    for path in Path(writer.path).glob(f"__{RANK}_*.distcp") if begun[-1] >= STEP else ():
        os.truncate(path, path.stat().st_size // 2)
    die()


POINTS = {
    "amax all-reduce": lambda: wrap(Exchange, "reduce", before=die),  # the other rank waits in it
    "async save": lambda: wrap(FileSystemWriter, "write_data", after=halve_and_die),
}

if __name__ == "__main__":
    wrap(pretrain.Trainer, "train_step", before=lambda trainer: begun.append(trainer.step + 1))
    if MORTAL:
        POINTS[os.environ["KILL_AT"]]()
    try:
        pretrain.main()
    finally:
        begun.append(STEP + 1)  # what waits in the background for the next step would wait for ever
