"""The recipes are scripts: what stands beside a script is importable from it, and so it is here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "recipes"))
sys.path.append(str(Path(__file__).parents[2] / "recipes" / "trainers"))
