"""Jobs of several processes that a benchmark starts, and that end with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

ENDED_WITHIN = 60.0
"""Seconds that a job has to end: torchrun waits 30 for its workers before it kills them."""


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a job to its end, as ``subprocess.run`` does with ``capture_output`` and ``text``.

    If this process is interrupted, or is sent SIGTERM, the job is asked to end and waited for. torchrun's workers have
    sessions of their own: those of a torchrun that is killed live on, and hold its GPUs.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    try:
        said = process.communicate()
    except BaseException:
        process.terminate()
        try:
            process.communicate(timeout=ENDED_WITHIN)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return subprocess.CompletedProcess(command, process.returncode, *said)
