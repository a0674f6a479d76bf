"""docs/api.md: it is what the code says now, every public name has an example, and every example runs."""

import pytest

from scripts.tables import api, api_examples

NAMES = [each for names in api.entries().values() for each in names]
ALONE = [name for name, example in api.examples().items() if not example.words]


def test_the_page_is_current():
    assert api.PAGE.read_text() == api.page(), f"docs/api.md is out of date: {api.COMMAND} renews it"


def test_every_public_name_is_on_it():
    for module in ("f8sub", "f8sub.optim", "f8sub.tensor_parallel", "f8sub.titan"):
        assert set(api.public_names(module)) == {name for own, name in NAMES if own == module}


def test_every_name_has_an_example():
    keys = {api.key_of(*each) for each in NAMES if not api.made_by_call(*each)}
    shown = {*api.examples(), *api.commands()} - {"titan_configs"}
    assert keys == shown, "add a function of that name to scripts/tables/api_examples.py"


def test_torchtitan_has_the_names_of_its_version():
    """The page has those of both versions; the one that is installed has its part of them."""
    pytest.importorskip("torchtitan")
    from f8sub import titan

    names = set(api.public_names("f8sub.titan"))
    assert set() < names & set(vars(titan)) < names


@pytest.mark.parametrize("name", ALONE)
def test_the_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name.startswith("titan"):
        pytest.importorskip("torchtitan")
    exec(compile(api.examples()[name].text, name, "exec"), {})


@pytest.mark.own_ranks
@pytest.mark.parametrize("name", sorted(api.examples().keys() - set(ALONE)))
def test_the_example_runs_on_ranks(rank, world, name):
    assert api.examples()[name].words == "ranks=2"
    getattr(api_examples, name)()
