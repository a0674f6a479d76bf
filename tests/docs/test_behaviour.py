"""Each row of docs/behaviour.md names the test or the finding that holds it; each finding is in a row."""

import ast
import os
import re

import pytest

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "behaviour.md"
SECTIONS = ["Formats and engines", "Trainers and optimizers", "FSDP2, compile and checkpoints"]
FEWEST_ROWS = 41


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


def why_not_held(by: str) -> str | None:
    """Why what a row names holds nothing; None where it does: a test, or a finding that can be run."""
    path, _, name = by.strip("`").partition("::")
    file = ROOT / path
    if not file.is_file():
        return "there is no such file"
    if path.startswith("findings/") and path.endswith(".sh"):
        return None if os.access(file, os.X_OK) else "it cannot be run"
    # What needs a GPU is not run wherever the page is read: it is a measurement.
    if not path.startswith("tests/") or path.startswith("tests/cuda/") or not name.startswith("test_"):
        return "it is neither a test nor a finding"
    functions = {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
    return None if name in functions else "the file has no such test"


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_is_held(row):
    assert why_not_held(row[-1]) is None


@pytest.mark.parametrize(
    ("by", "why"),
    [
        ("scripts/bench/questions_gpu.py::few_rows", "neither a test nor a finding"),
        ("scripts/bench_gpu.py", "neither a test nor a finding"),
        ("tests/models.py::equal", "neither a test nor a finding"),
        ("tests/integrations/test_neighbours.py", "neither a test nor a finding"),
        ("tests/cuda/test_linear.py::test_anything", "neither a test nor a finding"),
        ("findings/README.md", "neither a test nor a finding"),
        ("tests/integrations/test_neighbours.py::test_that_is_gone", "no such test"),
        ("findings/that_is_gone.sh", "no such file"),
    ],
)
def test_what_holds_nothing_is_refused(by, why):
    assert why in str(why_not_held(f"`{by}`"))


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
