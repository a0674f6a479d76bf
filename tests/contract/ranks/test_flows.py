"""How many files run in each flow of docs/architecture.md: a reader opens those to follow it."""

from scripts.bench.ranks import on_ranks
from scripts.tables.architecture import counted_flows, flows

MOST_FILES = {"flow_1": 12, "flow_2": 11, "flow_3": 10, "experts": 18, "load": 15, "estimate": 18}


def test_a_flow_runs_few_files():
    # Another test's context or delayed scaling, anywhere in a process, adds files to every later step.
    found = on_ranks(2, flows)[0] | on_ranks(1, counted_flows)[0]
    assert found.keys() == MOST_FILES.keys()
    assert not {name: files for name, files in found.items() if len(files) > MOST_FILES[name]}
