"""Two processes of ``scripts/test.sh`` end together: the first that comes to a file which both were given runs it."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

TOO_LATE = "a long test whose turn came after the minutes of scripts/test.sh --minutes"


class Lane:
    """A pytest plugin: long tests come last, and among the long and the others those of folders named ``ranks``.

    These are run a file at a time, without the files that the other process took: ``F8SUB_TEST_TAKEN`` names a folder
    that holds an empty file for each. Long tests whose turn comes after ``F8SUB_TEST_UNTIL``, in seconds since 1970,
    are skipped.
    """

    def __init__(self, taken: Path, until: float | None = None) -> None:
        self._taken, self._until = taken, until
        self.passed_over = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: (_is_long(item), _on_ranks(item)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """pytest's own loop; which test is the next one is known when a file is taken."""
        if session.testsfailed or session.config.option.collectonly:
            return None
        tests = self._own(session.items)
        test = next(tests, None)
        while test is not None:
            following = next(tests, None)
            if self._until is not None and _is_long(test) and time.time() > self._until:
                test.add_marker(pytest.mark.skip(reason=TOO_LATE))
            session.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            test = following
        return True

    def _own(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        is_own: dict[tuple[Path, bool], bool] = {}
        for item in items:
            part = item.path, _is_long(item)
            if part not in is_own:
                is_own[part] = not _on_ranks(item) or self._take(*part)
            if is_own[part]:
                yield item
            else:
                self.passed_over += 1

    def _take(self, path: Path, is_long: bool) -> bool:
        """Whether this process is the first that comes to the long tests of a file, or to the others."""
        name = "-".join([*path.parts[-3:], *(["long"] if is_long else [])])
        try:
            os.close(os.open(self._taken / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def _is_long(item: pytest.Item) -> bool:
    return item.get_closest_marker("long") is not None


def _on_ranks(item: pytest.Item) -> bool:
    return item.path.parent.name == "ranks"
