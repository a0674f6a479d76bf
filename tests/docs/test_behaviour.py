"""Each row of docs/behaviour.md names the test or the script that holds it; each script is in a row."""

import ast
import os
import re

import pytest

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "behaviour.md"
SECTIONS = ["Formats and engines", "Trainers and optimizers", "FSDP2, compile and checkpoints", "GPUs"]
FEWEST_ROWS = 45


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[-1] not in ("held by", "---")]


ROWS = rows()


def test_the_page_has_its_sections_and_rows():
    assert re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE) == SECTIONS
    assert len(ROWS) >= FEWEST_ROWS
    assert {len(row) for row in ROWS} == {4}
    assert len({row[0] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_is_held(row):
    path, _, name = row[-1].strip("`").partition("::")
    file = ROOT / path
    assert file.is_file(), path
    if path.startswith("findings/"):
        assert os.access(file, os.X_OK)
        return
    functions = {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
    assert name in functions


def test_each_script_is_in_a_row():
    held = {row[-1].strip("`") for row in ROWS}
    scripts = {f"findings/{path.name}" for path in (ROOT / "findings").glob("*.sh")}
    assert scripts
    assert scripts <= held


SCRIPTS = sorted((ROOT / "findings").glob("*.sh"))


@pytest.mark.parametrize("script", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_a_script_installs_pinned_releases_in_a_folder_that_it_removes(script):
    text = script.read_text()
    assert "folder=$(mktemp -d)\ntrap 'rm -rf \"$folder\"' EXIT\n" in text
    (installed,) = re.findall(r"pip\" install --quiet (.*)$", text, re.MULTILINE)
    assert all("==" in package for package in installed.split() if package != "numpy")
    assert "f8sub" not in text
    assert "raise SystemExit(" in text
