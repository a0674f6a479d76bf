"""What a run of the suite prints: a line a file, and each failure at once with the command that repeats it."""

import os
import shlex
import time
from pathlib import Path

import pytest

from tests.lanes import Lane

ROOT = Path(__file__).parents[1]
GPU_TESTS = ROOT / "tests" / "cuda"
LINES = 200
"""At most so many lines of a failure's traceback are printed."""


class Reporting:
    """A pytest plugin. ``F8SUB_TEST_LANE`` names the lane of ``scripts/test.sh`` in each of its lines."""

    def __init__(self, config: pytest.Config, lane: Lane | None) -> None:
        self._of_lane = lane
        self._terminal = config.pluginmanager.get_plugin("terminalreporter")
        # Failures are printed as they happen.
        self._terminal.summary_failures = self._terminal.summary_errors = lambda: None
        self._lane = os.environ.get("F8SUB_TEST_LANE", "")
        self._file, self._begun, self._in_file, self._done, self._all = "", time.monotonic(), 0, 0, 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._all = len(session.items)

    def pytest_report_teststatus(
        self, report: pytest.CollectReport | pytest.TestReport
    ) -> tuple[str, str, str] | None:
        """No letter a test: two lanes write to one terminal, line by line."""
        if report.failed:
            return ("error" if report.when != "call" else "failed"), "", "FAILED"
        if report.skipped and not hasattr(report, "wasxfail"):
            return "skipped", "", "SKIPPED"
        return ("passed" if report.when == "call" else ""), "", "PASSED"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._print_failure(report)

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        if location[0] != self._file:
            self._end_file()
            self._file, self._begun, self._in_file = location[0], time.monotonic(), 0

    def pytest_runtest_logfinish(self) -> None:
        self._in_file += 1
        self._done += 1

    def pytest_sessionfinish(self) -> None:
        self._end_file()

    def _end_file(self) -> None:
        if self._file:
            # Who shares the tests among processes of pytest-xdist has collected none.
            done = self._done + (self._of_lane.passed_over if self._of_lane else 0)
            share = f"{100 * done // self._all:3d} %  " if self._all else ""
            seconds = time.monotonic() - self._begun
            self._print(f"{share}{self._file}: {self._in_file} tests in {seconds:.1f} s")

    def _print_failure(self, report: pytest.TestReport) -> None:
        told = report.longreprtext.splitlines()
        if len(told) > LINES:  # pytest compares whole files, byte by byte, where the variable CI is set
            told[LINES - 50 : -50] = [f"[{len(told) - LINES} lines left out]"]
        lines = ["", f"FAILED {report.nodeid} ({report.when})", *told]
        for title, content in report.sections:
            lines += [f"--- {title} ---", *content.splitlines()[-60:]]
        lines += [f"To repeat it: ./scripts/test.sh {shlex.quote(report.nodeid)}", ""]
        self._print("\n".join(lines))

    def _print(self, text: str) -> None:
        prefix = f"{self._lane}  " if self._lane else ""
        self._terminal.ensure_newline()
        self._terminal.write_line("\n".join(f"{prefix}{line}".rstrip() for line in text.splitlines()))


def gpu_tests_left_out() -> str:
    """One line: how many test functions of ``tests/cuda`` are not collected here, and why."""
    sources = [path.read_text() for path in GPU_TESTS.rglob("test_*.py")]
    functions = sum(line.startswith("def test_") for source in sources for line in source.splitlines())
    because = "this machine has no CUDA device"
    return f"tests/cuda: {functions} test functions are not collected, because {because}"
