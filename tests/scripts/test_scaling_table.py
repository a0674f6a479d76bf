"""The tables of steps on many GPUs: the page shows what the script makes."""

from pathlib import Path

import pytest

from scripts.tables import scaling

DOCS = Path(__file__).parents[2] / "docs"
PAGES = "".join((DOCS / name).read_text() for name in ("scaling.md", "measurements/predictions.md"))


@pytest.mark.parametrize("marker", scaling.TABLES)
def test_the_page_shows_the_table(marker):
    assert f"<!-- begin {marker} -->\n{scaling.TABLES[marker]().markdown()}\n\n<sub>" in PAGES


@pytest.mark.long
def test_the_picture(tmp_path):
    """A panel for each model and number of tokens, with a line for each way and one for bf16."""
    figure = scaling.draw()
    assert len(figure.axes) == len(scaling.MODELS) * len(scaling.TOKENS)
    assert all(len(axes.lines) == 5 for axes in figure.axes)
