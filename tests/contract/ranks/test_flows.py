"""How many files run in each flow of docs/architecture.md: a reader opens those to follow it."""

import pytest

from scripts.tables.architecture import counted_flows, flows

MOST_FILES = {"flow_1": 12, "flow_2": 11, "flow_3": 10, "experts": 18, "load": 15, "estimate": 12}


def of_two(rank: int, world: int) -> dict[str, list[str]]:
    return flows()


def of_one(rank: int, world: int) -> dict[str, list[str]]:
    return counted_flows()


@pytest.mark.own_ranks
def test_a_flow_runs_few_files(ranks):
    # Another test's context or delayed scaling, anywhere in a process, adds files to every later step.
    found = ranks(2, of_two)[0] | ranks(1, of_one)[0]
    assert found.keys() == MOST_FILES.keys()
    assert not {name: files for name, files in found.items() if len(files) > MOST_FILES[name]}
