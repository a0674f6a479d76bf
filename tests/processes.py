"""Python programs that tests start."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONPATH = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "late_exit")))
"""Finds f8sub and tests, and has ranks of gloo end safely."""
