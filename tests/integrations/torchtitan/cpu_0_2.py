"""torchtitan 0.2 on CPUs and gloo: as a script, its command line (``torchrun -m
tests.integrations.torchtitan.cpu_0_2 --job.config_file ...``); for the tests, runs in forked ranks. It binds its
device by name in many modules, so that these are told.

Importing this changes what torchtitan believes the device to be: nothing imports it but ranks.
"""

import functools
import sys
from pathlib import Path
from typing import Any

import torch

from tests.integrations.torchtitan import gloo  # first: it sets what the others read when they are imported

# isort: split
import torchtitan.train
from torchtitan.models.moe import utils
from torchtitan.tools.logging import init_logger

from tests.integrations.torchtitan import jobs_0_2

device = gloo.CpuDevice("cpu_device")
for name, module in list(sys.modules.items()):
    if name.startswith("torchtitan"):
        for known, value in (("device_type", "cpu"), ("device_module", device)):
            if hasattr(module, known):
                setattr(module, known, value)
torchtitan.train.time = gloo.without_sleep(torchtitan.train.time)

# Experts take their tokens' places from a kernel, and their counts from a histogram that CPUs have of floats alone.
histogram = torch.histc
torch.histc = lambda given, **options: histogram(given.float(), **options).to(given.dtype)
utils.generate_permute_indices = functools.partial(utils.generate_permute_indices, use_cpu=True)

jobs_0_2.with_few_layers(gloo.with_sums)


def trainer_of(rank: int, arguments: list[str], folder: Path) -> Any:
    gloo.as_rank(rank, folder)
    init_logger()
    return torchtitan.train.Trainer(jobs_0_2.configured(arguments, folder))


if __name__ == "__main__":
    torchtitan.train.main(torchtitan.train.Trainer)
