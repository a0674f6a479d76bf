"""The recipes are scripts: what stands beside a script is importable from it, and so it is here."""

import sys
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes"
# In front, as a script's own folder is: what is installed may have modules of these names.
sys.path[:0] = [str(RECIPES), str(RECIPES / "trainers")]
