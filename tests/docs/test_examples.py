"""Every Python example of the pages runs with no names but its own: in this process, as a file, or on ranks."""

import pytest

from tests.docs.pages import (
    EXAMPLES,
    check_output,
    printed_as_script,
    run,
    run_as_file,
    run_on_rank,
    skip_other_torchtitan,
)
from tests.selection import long_but

FILES = [example for example in EXAMPLES if "WORLD_SIZE" in example.source]
"""Those that start a process group, as README's and the guide's training scripts do."""
OTHERS = [example for example in EXAMPLES if example not in FILES]
ALONE = [example for example in OTHERS if example.world is None]
ON_RANKS = [example for example in OTHERS if example.world is not None]


@pytest.mark.parametrize(
    "example", long_but(FILES[:1], FILES), ids=lambda example: getattr(example, "where", None)
)
def test_it_runs_as_a_file(example, tmp_path):
    skip_other_torchtitan(example.source)
    run_as_file(example, tmp_path)


@pytest.mark.parametrize("example", FILES[1:], ids=lambda example: example.where)
def test_it_runs_where_a_process_group_is(example, ranks, tmp_path):
    """On forked ranks, which take a fifth of the time of torchrun's."""
    skip_other_torchtitan(example.source)
    check_output(example, "".join(ranks(example.world, printed_as_script, example, tmp_path)))


@pytest.mark.parametrize("example", ALONE, ids=lambda example: example.where)
def test_it_runs(example, tmp_path, monkeypatch):
    skip_other_torchtitan(example.source)
    monkeypatch.chdir(tmp_path)
    run(example)


@pytest.mark.parametrize("example", ON_RANKS, ids=lambda example: example.where)
def test_it_runs_on_ranks(example, ranks):
    skip_other_torchtitan(example.source)
    ranks(example.world, run_on_rank, example)
