"""What two lanes of ``test.sh`` were both given is run once; pytest is told the test that follows in the same lane."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.lanes import Lane


class Session:
    """Of pytest, with tests of some files, and what it was told to run."""

    def __init__(self, files: list[str], told: list[tuple[str, str | None]]) -> None:
        self.items = [
            SimpleNamespace(path=Path("/tests", file), name=f"{file}:{n}") for file in files for n in (1, 2)
        ]
        self.testsfailed, self.shouldfail, self.shouldstop = 0, False, False
        self.config = SimpleNamespace(
            option=SimpleNamespace(collectonly=False), hook=SimpleNamespace(pytest_runtest_protocol=self.run)
        )
        self.told = told

    def run(self, item: SimpleNamespace, nextitem: SimpleNamespace | None) -> None:
        self.told.append((item.name, nextitem and nextitem.name))


def test_each_file_of_ranks_is_run_once_and_last(tmp_path):
    told = [], []
    files = ["a/ranks/test_1.py", "a/test_0.py", "a/ranks/test_2.py"], ["b/test_3.py", "a/ranks/test_1.py"]
    lanes, sessions = (
        [Lane(tmp_path) for _ in range(2)],
        [Session(*each) for each in zip(files, told, strict=True)],
    )
    for lane, session in zip(lanes, sessions, strict=True):
        lane.pytest_collection_modifyitems(session.items)
        assert lane.pytest_runtestloop(session)
    for of_lane in told:
        assert [following for _, following in of_lane] == [*(name for name, _ in of_lane[1:]), None]
    ran = [[name for name, _ in of_lane] for of_lane in told]
    assert ran[0] == [
        f"a/{file}:{n}" for file in ("test_0.py", "ranks/test_1.py", "ranks/test_2.py") for n in (1, 2)
    ]
    assert ran[1] == ["b/test_3.py:1", "b/test_3.py:2"]
    assert [lane.passed_over for lane in lanes] == [0, 2]


@pytest.mark.parametrize("wanted", ["testsfailed", "shouldfail", "shouldstop"])
def test_it_ends_where_pytests_own_loop_does(tmp_path, wanted):
    session = Session(["b/test_3.py"], [])
    setattr(session, wanted, 1 if wanted == "testsfailed" else "told")
    session.Failed, session.Interrupted = pytest.Session.Failed, pytest.Session.Interrupted
    if wanted == "testsfailed":
        assert Lane(tmp_path).pytest_runtestloop(session) is None
        assert session.told == []
        return
    with pytest.raises((session.Failed, session.Interrupted)):
        Lane(tmp_path).pytest_runtestloop(session)
    assert len(session.told) == 1
