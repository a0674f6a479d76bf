"""Two processes of ``scripts/test.sh`` end together: the first that comes to a file which both were given runs it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


class Lane:
    """A pytest plugin: tests of folders named ``ranks`` come last, a file at a time, without those that the other took.

    ``F8SUB_TEST_TAKEN`` names a folder that holds an empty file for each of them that a process took.
    """

    def __init__(self, taken: Path) -> None:
        self._taken = taken
        self.passed_over = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: item.path.parent.name == "ranks")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """pytest's own loop; which test is the next one is known when a file is taken."""
        if session.testsfailed or session.config.option.collectonly:
            return None
        tests = self._own(session.items)
        test = next(tests, None)
        while test is not None:
            following = next(tests, None)
            session.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            test = following
        return True

    def _own(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        is_own: dict[Path, bool] = {}
        for item in items:
            if item.path not in is_own:
                is_own[item.path] = item.path.parent.name != "ranks" or self._take(item.path)
            if is_own[item.path]:
                yield item
            else:
                self.passed_over += 1

    def _take(self, path: Path) -> bool:
        """Whether this process is the first that comes to a file."""
        name = "-".join(path.parts[-3:])
        try:
            os.close(os.open(self._taken / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True
