"""The tutorial: its page and notebook are what the script says, and script and notebook run on a CPU."""

import json
import subprocess
import sys

import pytest

from scripts.tables import tutorial
from tests.docs.pages import on_a_cpu

RENEWS = f"out of date: {tutorial.COMMAND} renews it"


def test_the_page_and_the_notebook_are_current():
    assert tutorial.PAGE.read_text() == tutorial.page(), RENEWS
    assert json.loads(tutorial.NOTEBOOK.read_text()) == tutorial.notebook(), RENEWS


def run(script, tmp_path):
    """What a script prints that runs in another folder."""
    done = subprocess.run([sys.executable, "-P", str(script)], **on_a_cpu(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_script_runs(tmp_path):
    assert "the resumed run has the losses of the uninterrupted one" in run(tutorial.SCRIPT, tmp_path)


@pytest.mark.long
def test_the_notebook_runs(tmp_path):
    """Its code cells, one after another, as a kernel runs them. They are the script's."""
    cells = json.loads(tutorial.NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    script = tmp_path / "cells.py"
    script.write_text(f"names = {{}}\nfor cell in {code!r}:\n    exec(cell, names)\n")
    assert "the resumed run has the losses of the uninterrupted one" in run(script, tmp_path)
