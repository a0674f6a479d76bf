"""Packages have modules named ``example``, ``data`` or ``model``; recipes, and what uses their parts, find theirs."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
SCRIPTS = {path.stem for path in RECIPES.rglob("*.py") if "__main__" in path.read_text()} | {"pretrain"}
"""What users start; their names are the files' and are imported by tests alone."""
FOREIGN = SCRIPTS | {"checkpoint", "compare", "data", "documents", "example", "metrics", "model", "settings"}
"""Names that modules of another package may have: those that recipes had before, and those of scripts."""


def imported(path: Path) -> set[str]:
    """Top-level names that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def test_parts_of_recipes_have_names_that_nothing_else_has():
    parts = {
        path.stem for path in (*RECIPES.rglob("*.py"), *(p.parent for p in RECIPES.rglob("__init__.py")))
    }
    users = [*RECIPES.rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    bare = {
        str(path.relative_to(ROOT)): sorted(found)
        for path in users
        if (found := {name for name in imported(path) & parts - {"pretrain"} if not name.startswith("f8sub")})
    }
    assert not bare


@pytest.fixture
def foreign(tmp_path) -> Path:
    """A folder of modules that are nobody's, and of another package's that were imported before a script begins."""
    for name in FOREIGN:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} of another package')\n")
    early = sorted(FOREIGN - SCRIPTS)
    modules = f"sys.modules.update({{name: types.ModuleType(name) for name in {early}}})"
    (tmp_path / "sitecustomize.py").write_text(f"import sys, types\n{modules}\n")
    return tmp_path


def python(foreign: Path, *words: str | Path) -> str:
    """What a Python says that has the modules on its path, before all but a script's own folder."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(foreign), str(ROOT)]),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_the_trainer_starts(foreign):
    assert "--float8.recipe" in python(foreign, RECIPES / "pretrain.py", "--help")


@pytest.mark.long
def test_tables_find_the_parts_of_the_trainer(foreign):
    users = [
        path.stem
        for path in (ROOT / "scripts" / "tables").glob("*.py")
        if "f8sub_pretrain" in path.read_text()
    ]
    assert len(users) >= 5
    modules = ", ".join(f"scripts.tables.{name}" for name in users)
    code = f"import {modules}; from f8sub_pretrain import compare, documents; print(documents.__file__)"
    assert python(foreign, "-c", code).strip() == str(RECIPES / "f8sub_pretrain" / "documents.py")


@pytest.mark.long
def test_the_tests_of_trainers_find_the_scripts(foreign):
    trainers = "tests/recipes/test_trainers.py", "tests/recipes/test_lora.py"
    said = python(foreign, "-m", "pytest", "--collect-only", "-q", *trainers)
    assert "test_trainers.py::" in said
