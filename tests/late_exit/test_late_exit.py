"""A rank whose threads of gloo live on waits for them before Python ends."""

import os
import subprocess
import sys

import pytest

from tests.processes import PYTHONPATH

GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
held = dist.group.WORLD
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("body", "waits"), [(GROUP, "waits 0.5\n"), ("", "")], ids=["gloo", "no_group"])
def test_a_process_waits_where_gloo_has_threads(body, waits):
    code = f"import time\ntime.sleep = lambda seconds: print('waits', seconds)\n{body}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
    )
    assert done.stdout == waits, done.stderr
