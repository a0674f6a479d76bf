"""The site is built strictly from the pages, and has each of them, with search."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

pytest.importorskip("mkdocs")
pytest.importorskip("material")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    # Not --quiet, with which --strict counts no warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_there_and_rendered(site):
    for page in (ROOT / "docs").rglob("*.md"):
        path = page.relative_to(ROOT / "docs").with_suffix(".html")
        path = path.with_name("index.html") if page.name == "README.md" else path
        text = (site / path).read_text()
        shown = re.sub(r"<pre.*?</pre>|<code.*?</code>", "", text, flags=re.DOTALL)
        assert "```" not in shown, f"{page}: a fence is no block of code"
        assert "| ---" not in shown, f"{page}: a table is no table"


def test_the_readme_is_the_first_page_and_search_finds_it(site):
    assert "f8sub speeds up FSDP2 training" in (site / "index.html").read_text()
    found = {
        entry["location"] for entry in json.loads((site / "search/search_index.json").read_text())["docs"]
    }
    assert {"index.html", "guide.html", "api.html", "measurements/whole_runs.html"} <= found


def test_files_that_pages_link_to_are_there(site):
    assert (site / "source/recipes/pretrain.py").read_bytes() == (ROOT / "recipes/pretrain.py").read_bytes()
    assert (site / "tutorial.ipynb").exists()
    # A page outside of docs/, and its link back.
    assert '"../../behaviour.html"' in (site / "source/findings/index.html").read_text()
