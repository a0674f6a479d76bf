"""Python imports this first in processes that tests start (``tests.processes``): ranks of gloo end half a second later.

gloo's worker threads outlive ``destroy_process_group``, because DTensor's caches hold the group. One that drops a
collective's last tensor while Python is finalized takes the process with it ("terminate called without an active
exception", torch 2.13, with or without f8sub; CI saw it on a loaded machine). They need microseconds of a core.
"""

import atexit
import time
from pathlib import Path


@atexit.register
def _let_gloo_finish() -> None:
    if any("gloo" in name.read_text() for name in Path("/proc/self/task").glob("*/comm")):
        time.sleep(0.5)
