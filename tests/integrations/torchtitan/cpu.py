"""torchtitan 0.3 on CPUs and gloo: as a script, its command line (``torchrun -m tests.integrations.torchtitan.cpu
--module ...``); for the tests, runs in forked ranks. No function of torchtitan is replaced: it takes all from its
environment, which is set first.

Importing this changes what torchtitan believes the device to be: nothing imports it but ranks.
"""

from pathlib import Path
from typing import Any

from tests.integrations.torchtitan import gloo, older_torch  # noqa: F401  (set what the others read when imported)

# isort: split
from torchtitan.tools import utils

utils.device_type, utils.device_module = "cpu", gloo.CpuDevice("cpu_device")

import torchtitan.train  # noqa: E402
import torchtitan.trainer  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402

from tests.integrations.torchtitan import configs  # noqa: E402

torchtitan.trainer.time = gloo.without_sleep(torchtitan.trainer.time)


def trainer_of(rank: int, arguments: list[str], folder: Path) -> Any:
    gloo.as_rank(rank, folder)
    init_logger()
    return configs.configured(arguments, folder).build()


if __name__ == "__main__":
    torchtitan.train.main()
