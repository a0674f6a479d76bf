"""Scripts as users run them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import PYTHONPATH, ROOT


@pytest.fixture(scope="session")
def run_script(tmp_path_factory):
    """Runs a script and returns what became of it, its figures as ``figures`` where it wrote some."""

    def run(script: str, *options: str | Path, by: tuple[str, ...] = (), **environment: str):
        figures = tmp_path_factory.mktemp("figures") / "figures.json"
        finished = subprocess.run(
            [sys.executable, *by, ROOT / "scripts" / script, *options, "--json", figures],
            capture_output=True,
            text=True,
            timeout=1200,
            env={**os.environ, "PYTHONPATH": PYTHONPATH, "CUDA_VISIBLE_DEVICES": "", **environment},
        )
        finished.figures = json.loads(figures.read_text()) if figures.exists() else None
        return finished

    return run
