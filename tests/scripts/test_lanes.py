"""What two lanes of ``test.sh`` were both given is run once; pytest is told the test that follows in the same lane."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.lanes import TOO_LATE, Lane


class Item(SimpleNamespace):
    """A test, with the names of its markers and what it is skipped for."""

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        assert mark.name == "skip"
        self.skipped_for = mark.kwargs["reason"]


class Session:
    """Of pytest, with two tests of each file, and what it was told to run; of some files the second test is long."""

    def __init__(self, files: list[str], told: list[tuple[str, str | None]], with_long: bool = False) -> None:
        self.items = [
            Item(
                path=Path("/tests", file),
                name=f"{file}:{n}",
                markers=["long"] if with_long and n == 2 else [],
                skipped_for=None,
            )
            for file in files
            for n in (1, 2)
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


def test_long_tests_come_last_and_other_ranks_may_take_those_of_a_file(tmp_path):
    told = [], []
    files = ["a/ranks/test_1.py", "a/test_0.py"], ["a/ranks/test_1.py", "b/test_3.py"]
    sessions = [Session(*each, with_long=True) for each in zip(files, told, strict=True)]
    lanes = [Lane(tmp_path) for _ in sessions]
    for lane, session in zip(lanes, sessions, strict=True):
        lane.pytest_collection_modifyitems(session.items)
    (tmp_path / "a-ranks-test_1.py-long").touch()  # the other lane came to them while this one ran the first
    for lane, session in zip(lanes, sessions, strict=True):
        assert lane.pytest_runtestloop(session)
    ran = [[name for name, _ in of_lane] for of_lane in told]
    assert ran == [
        ["a/test_0.py:1", "a/ranks/test_1.py:1", "a/test_0.py:2"],
        ["b/test_3.py:1", "b/test_3.py:2"],
    ]
    assert [lane.passed_over for lane in lanes] == [1, 2]


@pytest.mark.parametrize(("until", "reason"), [(0.0, TOO_LATE), (float("inf"), None), (None, None)])
def test_long_tests_whose_turn_comes_too_late_are_skipped(tmp_path, until, reason):
    session = Session(["b/test_3.py"], [], with_long=True)
    Lane(tmp_path, until).pytest_runtestloop(session)
    assert [item.skipped_for for item in session.items] == [None, reason]
    assert len(session.told) == 2


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
