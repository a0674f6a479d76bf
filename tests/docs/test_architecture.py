"""docs/architecture.md and its picture say what the code says now."""

import re

import pytest
import torch

from scripts.tables import architecture
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
TESTED = re.search(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
RENEWS = f"out of date: {architecture.COMMAND} renews it"


def written(marker: str) -> str:
    """A table without the command below it."""
    return PAGE.partition(f"<!-- begin {marker} -->\n")[2].partition("\n\n<sub>")[0]


def test_the_picture_is_drawn_from_todays_imports():
    assert architecture.drawn_from(architecture.PICTURE.read_text()) == architecture.data(), RENEWS


def test_the_picture_shows_every_folder():
    drawn = architecture.data()
    svg = architecture.picture(drawn)
    assert all(f">{name.rpartition('/')[2]}</text>" in svg for name in drawn)
    assert architecture.drawn_from(svg) == drawn


def test_the_folders_are_todays():
    assert written("folders") == architecture.folder_table(), RENEWS


def flows(rank: int, world: int) -> dict[str, list[str]]:
    return architecture.flows()


@pytest.mark.own_ranks
def test_the_flows_are_todays(ranks):
    if TESTED is None or torch.__version__.partition("+")[0] != TESTED[1]:
        pytest.skip("the flows are those of the version of torch in constraints.txt")
    for marker, names in ranks(2, flows)[0].items():
        assert written(marker) == architecture.flow_table(names), RENEWS
