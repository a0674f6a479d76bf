"""A benchmark that is stopped leaves no worker behind."""

import os
import signal
import subprocess
import sys
import time

import pytest

from scripts.bench import jobs
from scripts.table import ROOT

WORKER = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(600)
"""
SCRIPT = "import sys\nfrom scripts.bench import jobs\njobs.run(sys.argv[1:])"


def test_what_a_job_says():
    done = jobs.run([sys.executable, "-c", "import sys; print(1); print(2, file=sys.stderr); sys.exit(3)"])
    assert (done.returncode, done.stdout, done.stderr) == (3, "1\n", "2\n")


@pytest.mark.long
def test_workers_end_with_the_script(tmp_path):
    worker, written = tmp_path / "worker.py", tmp_path / "pid"
    worker.write_text(WORKER)
    job = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(worker), str(written)]
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *job], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    while not written.exists() or not written.read_text():
        assert script.poll() is None
        time.sleep(0.1)
    script.send_signal(signal.SIGTERM)
    assert "stopped by SIGTERM" in script.communicate()[1]
    with pytest.raises(ProcessLookupError):
        os.kill(int(written.read_text()), 0)
