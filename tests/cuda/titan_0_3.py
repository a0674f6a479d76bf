"""torchtitan 0.3 on GPUs and NCCL: ``torchrun -m tests.cuda.titan_0_3 FOLDER`` trains each job of FOLDER/jobs.json."""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from tests.integrations.torchtitan import older_torch  # noqa: F401  (before torchtitan, which imports what it adds)

# isort: split
import torch
import torchtitan.trainer
from torchtitan.distributed import cudagraph
from torchtitan.tools.logging import init_logger

import f8sub
from tests.integrations.torchtitan import configs, gloo

torchtitan.trainer.time = gloo.without_sleep(torchtitan.trainer.time)


def train(arguments: list[str], folder: Path) -> dict[str, Any]:
    """As ``gloo.train``; and ``captured``: of each of torchtitan's graphs, whether it was captured."""
    torch._dynamo.reset()  # models of several jobs have the same code, which is compiled for so many alone
    trainer = configs.configured(arguments, folder).build()
    close, captured = trainer.close, []

    def closed() -> None:
        captured.extend(wrapper._graph is not None for wrapper in cudagraph._manager._wrappers)
        close()

    trainer.close = closed
    found = gloo.train(trainer)
    return {"losses": list(found["losses"].values()), "captured": captured}


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    gloo.as_rank(rank, folder)
    os.environ["LOCAL_RANK"] = str(rank)
    init_logger()
    jobs = json.loads((folder / "jobs.json").read_text())
    warnings.simplefilter("error", f8sub.Float8Warning)
    warnings.filterwarnings("ignore", ".*no native float8 GEMM")
    os.chdir(folder)
    found = {job: train(job.split(), folder) for job in jobs}
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
