"""docs/api.md and docs/architecture.md, with its map, are what the code says now.

Every public name has an example, and every example runs.
"""

import re

import pytest
import torch

from scripts.tables import api, api_examples, architecture
from tests.docs.pages import ROOT, shows_other_torchtitan, skip_other_torchtitan

NAMES = [each for names in api.entries().values() for each in names]
ALONE = [name for name, example in api.examples().items() if not example.words]
ON_RANKS = [
    pytest.param(
        name, marks=pytest.mark.skipif(shows_other_torchtitan(example.text), reason="shows torchtitan 0.3")
    )
    for name, example in sorted(api.examples().items())
    if example.words
]

PAGE = (ROOT / "docs" / "architecture.md").read_text()
TESTED = re.search(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
RENEWS = f"out of date: {architecture.COMMAND} renews it"


def test_the_page_is_current():
    assert api.PAGE.read_text() == api.page(), f"docs/api.md is out of date: {api.COMMAND} renews it"


def test_every_public_name_is_on_it():
    for module in ("f8sub", "f8sub.optim", "f8sub.tensor_parallel", "f8sub.titan"):
        assert set(api.public_names(module)) == {name for own, name in NAMES if own == module}


def test_every_name_has_an_example():
    keys = {api.key_of(*each) for each in NAMES if not api.made_by_call(*each)}
    shown = {*api.examples(), *api_examples.COMMANDS} - {"titan_configs"}
    assert keys == shown, "add a function of that name to scripts/tables/api_examples.py"


def test_torchtitan_has_the_names_of_its_version():
    """The page has those of both versions; the one that is installed has its part of them."""
    pytest.importorskip("torchtitan")
    from f8sub import titan

    names = set(api.public_names("f8sub.titan"))
    assert set() < names & set(dir(titan)) < names


@pytest.mark.parametrize("name", ALONE)
def test_the_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    skip_other_torchtitan(api.examples()[name].text)
    exec(compile(api.examples()[name].text, name, "exec"), {})


@pytest.mark.own_ranks
@pytest.mark.parametrize("name", ON_RANKS)
def test_the_example_runs_on_ranks(rank, world, name):
    assert api.examples()[name].words == "ranks=2"
    getattr(api_examples, name)()


def written(marker: str) -> str:
    """A table without the command below it."""
    return PAGE.partition(f"<!-- begin {marker} -->\n")[2].partition("\n\n<sub>")[0]


def test_the_map_is_of_todays_imports():
    assert written("map") == architecture.diagram(), RENEWS


def test_the_map_has_every_room_and_no_way_that_another_has():
    pairs = {("weights", "kernels"), ("weights", "values"), ("kernels", "values"), ("kernels", "weights")}
    assert architecture.nearest(pairs) == [("kernels", "values"), ("weights", "kernels")]
    shown = architecture.diagram()
    assert all(f" {room}" in shown for room in architecture.ROOMS)


def test_the_rooms_are_todays():
    assert written("rooms") == architecture.room_table(), RENEWS


def flows(rank: int, world: int) -> dict[str, list[str]]:
    return architecture.flows()


@pytest.mark.own_ranks
def test_the_flows_are_todays(ranks):
    if TESTED is None or torch.__version__.partition("+")[0] != TESTED[1]:
        pytest.skip("the flows are those of the version of torch in constraints.txt")
    for marker, names in ranks(2, flows)[0].items():
        assert written(marker) == architecture.flow_table(names), RENEWS
